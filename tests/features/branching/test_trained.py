"""Continuations that are trained on: the expected gradient by enumeration, updates by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.protocol import DataProto
from features.branching.settings import BranchingSettings
from features.branching.training_rows import IS_BRANCH, BranchRows
from tests.cut_updates import LAYOUTS, Recorder, Workers, as_plain, config_of, make_models
from tests.features.branching.trees import Played, batch_of, episode_of, rule_of
from tests.uncut_trees import VOCABULARY
from training.config import PPOConfig
from training.step_phases import StepPhases
from training.worker_groups import WorkerGroups
from workers.dp_actor import DataParallelPPOActor
from workers.dp_critic import DataParallelPPOCritic
from workers.model.forward_settings import ForwardSettings
from workers.model.policy_model import PolicyModel, ValueModel
from workers.model.probe_set import UpdateProbes
from workers.model.token_counts import TokenCounts
from workers.rollout.episode import Episode

EVERY = BranchingSettings(at=("every",), samples=1, train=True)
NOBODY: Any = None


# The expected gradient of a game that is enumerated.

MOST_TURNS = 3
STOP, GO = 1, 2
# Of going on, before each turn; the reward of a turn by what was done before and in it.
LOGITS = torch.tensor([0.3, -0.4, 0.7], dtype=torch.float64)
REWARDS = {"1": 0.5, "2": 0.25, "21": -1.0, "22": 2.0, "221": 1.5, "222": -0.75}


def continued(beginning: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All whole episodes that begin so."""
    if len(beginning) == MOST_TURNS or STOP in beginning:
        yield tuple(beginning)
        return
    for action in (STOP, GO):
        yield from continued([*beginning, action])


def chance(actions: Sequence[int], first: int = 0) -> float:
    """Of what is done from a turn on."""
    goes = LOGITS.sigmoid()
    total = 1.0
    for turn in range(first, len(actions)):
        total *= float(goes[turn] if actions[turn] == GO else 1 - goes[turn])
    return total


def derivative(turn: int, action: int) -> Tensor:
    """Of the log-probability of an action, by the logits."""
    result = torch.zeros(MOST_TURNS, dtype=torch.float64)
    result[turn] = (1.0 if action == GO else 0.0) - LOGITS.sigmoid()[turn]
    return result


def as_turns(actions: Sequence[int]) -> list[Played]:
    return [
        ([action], [3], REWARDS["".join(map(str, actions[: turn + 1]))])
        for turn, action in enumerate(actions)
    ]


def policy_gradient() -> Tensor:
    total = torch.zeros(MOST_TURNS, dtype=torch.float64)
    for actions in continued([]):
        paid = sum(reward for _, _, reward in as_turns(actions))
        scores = [derivative(turn, action) for turn, action in enumerate(actions)]
        total += chance(actions) * paid * torch.stack(scores).sum(0)
    return total


def samples_of(actions: Sequence[int], turns: Sequence[int]) -> Iterator[tuple[float, Episode]]:
    """An episode with all continuations that it may have, and their chances."""
    reached = [turn for turn in turns if turn < len(actions)]
    choices = [list(continued(actions[:turn])) for turn in reached]
    for chosen in itertools.product(*choices):
        episode = episode_of([5], as_turns(actions))
        weight = chance(actions)
        for turn, other in zip(reached, chosen, strict=True):
            weight *= chance(other, turn)
            episode.branches.append(episode_of([5], as_turns(other), begin=turn))
        yield weight, episode


def sampled_gradient(rows: DataProto) -> Tensor:
    total = torch.zeros(MOST_TURNS, dtype=torch.float64)
    fields = rows.batch
    for row, column in fields["response_mask"].nonzero().tolist():
        turn = int(fields["turn_ids"][row, column])
        action = int(fields["responses"][row, column])
        total += fields["advantages"][row, column] * derivative(turn, action)
    return total


def with_continuations(config: PPOConfig, batch: DataProto) -> DataProto:
    """The rows that an update is given."""
    groups = WorkerGroups(NOBODY, NOBODY, NOBODY, NOBODY, None)
    phases = StepPhases(config, groups, lambda data: data.batch["environment_rewards"])
    batch = phases.arrange(batch)
    scores, infos = phases.start_reward(batch)()
    batch = phases.add_rewards(batch, scores, infos)
    phases.apply_kl_penalty(batch)
    batch = phases.add_advantages(batch)
    rows, _ = BranchRows(config, 0).add(batch, NOBODY)
    return rows


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("estimator", "at", "turns"),
    [
        ("vine", ("every",), (0, 1, 2)),
        ("vine", (1,), (1,)),
        ("tree_grpo", ("every",), (0, 1, 2)),
        ("tree_grpo", (0, 2), (0, 2)),
    ],
)
def test_the_expected_gradient_is_the_policy_gradient(
    estimator: str, at: tuple[Any, ...], turns: tuple[int, ...]
) -> None:
    config = config_of(estimator, actor={"loss_agg_mode": "token-sum"}, groups=1, members=1)
    config = replace(config, algorithm=replace(config.algorithm, turn_gamma=1.0))
    rule = rule_of(config, replace(EVERY, at=at))
    total = torch.zeros(MOST_TURNS, dtype=torch.float64)
    weight_of_all = 0.0
    without_weights = torch.zeros(MOST_TURNS, dtype=torch.float64)
    for actions in continued([]):
        for weight, episode in samples_of(actions, turns):
            rows = with_continuations(config, batch_of([episode], rule, 8, torch.float64))
            assert len(rows) == 1 + len(episode.branches)
            total += weight * sampled_gradient(rows)
            weight_of_all += weight
            for row, weights in enumerate(rows.non_tensor_batch["turn_weights"]):
                for turn, of_turn in enumerate(weights):
                    rows.batch["advantages"][row][rows.batch["turn_ids"][row] == turn] /= of_turn
            without_weights += weight * sampled_gradient(rows)
    assert weight_of_all == pytest.approx(1)
    assert torch.allclose(total, policy_gradient(), atol=1e-8)
    exact = policy_gradient()
    differs = without_weights / without_weights.norm() - exact / exact.norm()
    assert differs.norm() > 1e-3, "or weights are not needed in this game"


# An update by hand.

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
WIDTH = 24


def drawn_turns(rng: np.random.Generator, count: int) -> list[Played]:
    return [
        (
            rng.integers(4, VOCABULARY, rng.integers(1, 4)).tolist(),
            rng.integers(4, VOCABULARY, rng.integers(1, 3)).tolist(),
            float(rng.normal()),
        )
        for _ in range(count)
    ]


def drawn_episodes() -> list[Episode]:
    """Two groups of two episodes with continuations of other lengths than theirs."""
    rng = np.random.default_rng(3)
    episodes = []
    for group in range(2):
        prompt = rng.integers(4, VOCABULARY, 3).tolist()
        for sample, length in enumerate((2, 3)):
            turns = drawn_turns(rng, length)
            episode = episode_of(prompt, turns, group=group, sample=sample)
            for turn in range(1, length):
                for number in range(2):
                    further = drawn_turns(rng, int(rng.integers(1, 4)))
                    branch = episode_of(
                        prompt,
                        [*turns[:turn], *further],
                        group=group,
                        sample=sample,
                        begin=turn,
                        word=f"{turn}.{number}",
                    )
                    episode.branches.append(branch)
            episodes.append(episode)
    # The failure policy has masked it.
    left_out = episodes[1].branches[3]
    left_out.ending = "env_crash"
    left_out.rows[0].spans = []
    left_out.rows[0].reward_at = {}
    return episodes


def rewards_of(episode: Episode) -> list[float]:
    [row] = episode.rows
    return [row.reward_at[span.end - 1] for span in row.spans]


def later(rewards: Sequence[float], gamma: float) -> float:
    return sum(reward * gamma**number for number, reward in enumerate(rewards))


def by_hand(episodes: Sequence[Episode], estimator: str, gamma: float) -> list[Any]:
    """Advantage times weight of each turn, by (sequence, turn): the formulas, in loops."""
    found = []
    for episode in episodes:
        counted = [branch for branch in episode.branches if branch.ending == "done"]
        at: dict[int, list[Episode]] = {}
        for branch in counted:
            at.setdefault(branch.begin.turn, []).append(branch)
        own = rewards_of(episode)

        def mean_at(turn: int, at: dict[int, list[Episode]] = at) -> float:
            return float(np.mean([later(rewards_of(b)[turn:], gamma) for b in at[turn]]))

        def q_from(turn: int, own: list[float] = own, at: dict[int, list[Episode]] = at) -> float:
            if turn == len(own):
                return 0.0
            after = q_from(turn + 1)
            if turn + 1 in at:
                others = [later(rewards_of(b)[turn + 1 :], gamma) for b in at[turn + 1]]
                after = float(np.mean([after, *others]))
            return own[turn] + gamma * after

        group = [other for other in episodes if other.group == episode.group]
        [sibling] = [other for other in group if other is not episode]
        for turn in range(len(own)):
            reach = 1 + sum(len(at.get(j, [])) for j in range(turn + 1))
            path = np.prod([1 + len(at.get(j, [])) for j in range(turn + 1)])
            if estimator == "vine":
                value = mean_at(turn) if turn in at else later(rewards_of(sibling), gamma)
                behind = mean_at(turn + 1) if turn + 1 in at else 0.0
                found.append((episode, turn, (own[turn] + gamma * behind - value) / reach))
            else:
                value = mean_at(turn) if turn in at else None
                found.append((episode, turn, (q_from(turn), value, path, sibling)))
        for begun, branches in at.items():
            for branch in branches:
                earned = later(rewards_of(branch)[begun:], gamma)
                others = [later(rewards_of(b)[begun:], gamma) for b in branches if b is not branch]
                own_value = later(own[begun:], gamma) if estimator == "vine" else q_from(begun)
                advantage = earned - float(np.mean([own_value, *others]))
                for turn in range(begun, len(branch.turns)):
                    # Two would begin at each turn that the episode did not play.
                    unplayed = max(0, turn + 1 - len(own))
                    reach = 1 + 2 * unplayed
                    reach += sum(len(at.get(j, [])) for j in range(min(turn + 1, len(own))))
                    path = np.prod([1 + len(at.get(j, [])) for j in range(begun + 1)])
                    weight = 1 / reach if estimator == "vine" else 1 / path
                    found.append((branch, turn, advantage * weight))
    roots = {id(each[0]): each[2][0] for each in found if each[1] == 0 and estimator != "vine"}
    numbers = []
    for sequence, turn, value in found:
        if isinstance(value, tuple):
            q, compared, path, sibling = value
            compared = roots[id(sibling)] if compared is None else compared
            value = (q - compared) / path
        numbers.append((sequence, turn, value))
    return numbers


def gradients_by_hand(
    lm: torch.nn.Module, episodes: Sequence[Episode], estimator: str, mode: str, gamma: float
) -> Tensor:
    """The gradient of one mini-batch, in float64, over each token's own path."""
    mains = [episode for episode in episodes if episode.begin is None]
    own_tokens = sum(turn.tokens for episode in mains for turn in episode.turns)
    loss = torch.zeros((), dtype=torch.float64)
    for sequence, turn, value in by_hand(episodes, estimator, gamma):
        [row] = sequence.rows
        logits = lm(input_ids=torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        [span] = [each for each in row.spans if each.turn == turn]
        begin = len(row.prompt_ids) + span.start
        for place in range(begin, begin + span.end - span.start):
            term = -value * logits[place - 1, row.token_ids[place]]
            if mode == "token-mean":
                term = term / own_tokens
            elif mode == "seq-mean-token-sum":
                term = term / len(mains)
            elif mode == "seq-mean-token-mean":
                length = sum(each.end - each.start for each in row.spans)
                term = term / length / len(mains)
            loss = loss + term
    lm.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in lm.parameters()])


def updated(config: PPOConfig, batch: DataProto, layout: str) -> list[Tensor]:
    """The gradients of the core's mini-batches; the policy is the one that sampled."""
    models = make_models()
    models.old = models.policy
    settings = ForwardSettings(**LAYOUTS[layout])
    recorder = Recorder(PolicyModel(models.policy))
    actor = DataParallelPPOActor(
        config.actor_rollout_ref.actor,
        PolicyModel(models.policy),
        recorder,
        config.algorithm.rollout_correction,
        0.0,
        forward=settings,
        probes=UpdateProbes([TokenCounts()]),
    )
    critic = DataParallelPPOCritic(config.critic, ValueModel(models.critic), forward=settings)
    workers: Any = Workers(models, settings, actor, critic, config)
    groups = WorkerGroups(workers, workers, workers, workers, None)
    phases = StepPhases(config, groups, lambda data: data.batch["environment_rewards"])
    batch = phases.arrange(batch)
    scores, infos = phases.start_reward(batch)()
    if phases.needs_old_log_probs():
        batch, _ = phases.add_old_log_probs(batch)
    batch = phases.add_rewards(batch, scores, infos)
    phases.apply_kl_penalty(batch)
    batch = phases.add_advantages(batch)
    before = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    rows, metrics = BranchRows(config, 0).add(batch, workers)
    assert all(torch.equal(before[name], tensor) for name, tensor in batch.tensors().items())
    assert metrics["branching/trained_rows"] == 11
    assert rows.non_tensor_batch[IS_BRANCH].sum() >= 11
    phases.update_actor(rows)
    return recorder.seen


@pytest.mark.seconds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("estimator", ["vine", "tree_grpo"])
@pytest.mark.parametrize(
    ("split", "layout", "prompts"),
    [("whole", "padded", None), ("rows", "packed", None), ("three rows", "padded", 1)],
)
def test_an_update_has_the_gradient_by_hand(
    estimator: str, mode: str, split: str, layout: str, prompts: int | None
) -> None:
    actor = {"loss_agg_mode": mode, "ppo_mini_batch_size": prompts}
    config = config_of(estimator, actor=actor, split=split, groups=2, members=2)
    episodes = drawn_episodes()
    rule = rule_of(config, replace(EVERY, samples=2))
    lm = as_plain(make_models().policy)
    gradients = updated(config, batch_of(episodes, rule, WIDTH, torch.float32), layout)
    parts = [episodes] if prompts is None else [episodes[:2], episodes[2:]]
    assert len(gradients) == len(parts)
    for gradient, part in zip(gradients, parts, strict=True):
        expected = gradients_by_hand(lm, part, estimator, mode, config.algorithm.turn_gamma)
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5
