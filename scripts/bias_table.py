"""Computes the bias table: how far each combination's expected gradient is from the policy gradient.

A small MDP of several turns is enumerated: every episode, every group of four of them, with their probabilities. Each
group goes through the estimators, corrections and losses of `training`, in float64, so that the expected gradient is
exact, and not an average over samples. `python scripts/bias_table.py` writes training/config/bias.csv, which --explain
reads, and the two short tables of docs/algorithms.md.

The MDP: a turn is `stop`, which ends the episode, `go end` (short) or `go more` (long); three turns at most. What the
policy sees is the kind of the last turn and its place in this one, which makes six softmaxes of two tokens.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training import core_algos
from training.config.algorithm_settings import PolicyLossChoice, RolloutCorrectionConfig
from training.config.loader import SEQUENCE_REJECTION
from training.core_algos import (
    ESTIMATOR_NEEDS,
    LOSS_AGG_MODES,
    PolicyLossConfig,
    agg_loss,
    call_adv_estimator,
)
from training.rollout_correction import correct_as

TABLE = Path("training/config/bias.csv")
PAGE = Path("docs/algorithms.md")
TURNS, WIDTH, GROUP, STALE = 3, 6, 4, 3
STATES = ("start", "short", "long")
# What is listed: the other modes have the direction of seq-mean-token-sum, and its length times a constant.
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
# The size of an update, in logits.
STEP = 0.25
CORRECTIONS = {
    "old": RolloutCorrectionConfig(),
    "none": RolloutCorrectionConfig(),
    "token": RolloutCorrectionConfig(rollout_is="token"),
    "sequence": RolloutCorrectionConfig(rollout_is="sequence"),
    "token band": RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.5_2.0"),
    "sequence rejection": SEQUENCE_REJECTION,
}
# Of settings that change an estimator.
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo no_std": {"norm_adv_by_std_in_grpo": False},
    "gigpo no_std": {"norm_adv_by_std_in_grpo": False},
    "turn_gae unwhitened": {"whiten": False},
    "turn_return with itself": {"leave_one_out": False},
}
# Their advantages depend on the whole batch, and not on the group alone.
OF_BATCH = ("gae", "turn_gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gpg")
# They give a sequence one loss, whatever the mode of aggregation.
OWN_MODE = ("geo_mean", "sapo")
# They choose tokens of a micro-batch: enumerated for some estimators only, group by group.
CHOOSING = ("clip_cov", "kl_cov")
CHOOSING_WITH = ("gae", "grpo", "rloo")


@dataclass(frozen=True)
class Episode:
    """Is one way to play: the contexts and tokens, the turn of each, the turns' rewards and states."""

    contexts: tuple[int, ...]
    tokens: tuple[int, ...]
    turns: tuple[int, ...]
    rewards: tuple[float, ...]
    states: tuple[str, ...]


def turn_reward(state: str, kind: str, before: tuple[str, ...], last: bool) -> float:
    """Pays a turn; an episode that had both kinds of turns, and did not stop, ends with 1 more."""
    pays = {
        "short": {"start": 0.2, "short": 0.1, "long": 0.7},
        "long": {"start": 0.6, "short": 0.3, "long": -0.2},
    }
    if kind == "stop":
        return 0.0
    return pays[kind][state] + float(last and len({*before, kind}) == 2)


def play(turn: int = 0, state: str = "start", before: tuple[str, ...] = ()) -> Iterator[Episode]:
    """Yields every episode from here on."""
    first, second = 2 * STATES.index(state), 2 * STATES.index(state) + 1
    yield Episode((first,), (0,), (turn,), (0.0,), (state,))
    for token, kind in enumerate(("short", "long")):
        reward = turn_reward(state, kind, before, last=turn + 1 == TURNS)
        own = Episode((first, second), (1, token), (turn, turn), (reward,), (state,))
        rest = (
            play(turn + 1, kind, (*before, kind))
            if turn + 1 < TURNS
            else [Episode((), (), (), (), ())]
        )
        for later in rest:
            joined = [
                getattr(own, name) + getattr(later, name) for name in Episode.__dataclass_fields__
            ]
            yield Episode(*joined)


EPISODES = list(play())


@dataclass(frozen=True)
class World:
    """Holds all episodes as tensors, (episodes, WIDTH) unless said otherwise."""

    contexts: Tensor
    tokens: Tensor
    mask: Tensor
    turn_ids: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, episodes: list[Episode]) -> World:
        """Pads the episodes; a turn's reward stands on its last token."""

        def padded(rows: list[tuple[int, ...]], fill: int) -> Tensor:
            return torch.tensor([[*row, *[fill] * (WIDTH - len(row))] for row in rows])

        turns = padded([episode.turns for episode in episodes], -1)
        rewards = torch.zeros(turns.shape, dtype=torch.float64)
        for row, episode in enumerate(episodes):
            for turn, reward in enumerate(episode.rewards):
                rewards[row, len(episode.turns) - 1 - episode.turns[::-1].index(turn)] = reward
        given = (
            padded([episode.contexts for episode in episodes], 0),
            padded([e.tokens for e in episodes], 0),
        )
        return cls(*given, turns >= 0, turns, rewards)

    def log_probs(self, logits: Tensor) -> Tensor:
        """Takes the tokens' log-probs, 0 outside the mask: (episodes, WIDTH)."""
        return logits.log_softmax(-1)[self.contexts, self.tokens] * self.mask

    def probabilities(self, logits: Tensor) -> Tensor:
        """Takes the episodes' probabilities: (episodes,)."""
        return self.log_probs(logits).sum(-1).exp()

    def expected(self, logits: Tensor, returns: Tensor | None = None) -> Tensor:
        """Differentiates the expected return exactly, (6, 2): returns (episodes, WIDTH) are of each token on."""
        leaf = logits.clone().requires_grad_()
        chances = self.probabilities(logits)
        gained = self.rewards.sum(-1, keepdim=True) if returns is None else returns
        (chances[:, None] * self.log_probs(leaf) * gained).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def values(self, logits: Tensor) -> Tensor:
        """Averages what is still to come over the episodes that began alike: the exact critic's, (episodes, WIDTH)."""
        chances, to_come = self.probabilities(logits), self.rewards.flip(1).cumsum(1).flip(1)
        values = torch.zeros_like(to_come)
        for row, column in self.mask.nonzero().tolist():
            alike = (self.tokens[:, :column] == self.tokens[row, :column]).all(1) & self.mask[
                :, column
            ]
            values[row, column] = (chances * to_come[:, column])[alike].sum() / chances[alike].sum()
        return values


WORLD = World.of(EPISODES)


@dataclass(frozen=True)
class Setting:
    """Says who sampled, who is updated, and who teaches: logits, (6, 2)."""

    sampler: Tensor
    updated: Tensor
    teacher: Tensor


@cache
def setting(stale: int) -> Setting:
    """Makes the policies; the updated one is `stale` steps along the true gradient from the sampler."""
    generator = torch.Generator().manual_seed(0)
    sampler, teacher = torch.randn(2, 6, 2, generator=generator, dtype=torch.float64)
    updated = sampler
    for _ in range(stale):
        gradient = WORLD.expected(updated)
        updated = updated + STEP * gradient / gradient.norm()
    return Setting(sampler, updated, teacher)


@dataclass(frozen=True)
class Groups:
    """Holds groups of `size` episodes; each order of the same ones is the same group.

    Attributes:
        rows: (groups * size,) int64, the episode of each row.
        chances: (groups,) the probability of the group, in any order.
    """

    rows: Tensor
    chances: Tensor
    size: int

    @classmethod
    def every(cls, sampler: Tensor, size: int = GROUP) -> Groups:
        """Lists all groups there are."""
        groups = list(itertools.combinations_with_replacement(range(len(EPISODES)), size))
        counts = [
            [math.factorial(group.count(episode)) for episode in set(group)] for group in groups
        ]
        orders = torch.tensor(
            [math.factorial(size) / math.prod(own) for own in counts], dtype=torch.float64
        )
        rows = torch.tensor(groups)
        return cls(rows.flatten(), WORLD.probabilities(sampler)[rows].prod(-1) * orders, size)

    def only(self, numbers: list[int]) -> Groups:
        """Keeps some of the groups."""
        return Groups(
            self.rows.view(-1, self.size)[numbers].flatten(), self.chances[numbers], self.size
        )

    @property
    def index(self) -> np.ndarray:
        """Numbers the group of each row."""
        return np.repeat(np.arange(len(self.chances)), self.size)

    def weights(self, mask: Tensor, mode: str) -> Tensor:
        """Asks `agg_loss` for what it multiplies each token with, group by group: (rows, WIDTH)."""
        leaf = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
        sums = [
            agg_loss(own, inside, mode)
            for own, inside in zip(leaf.split(self.size), mask.split(self.size))
        ]  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(torch.stack(sums).sum(), leaf)
        return gradient


GROUPS = Groups.every(setting(0).sampler)


@dataclass(frozen=True)
class Case:
    """Is what a trainer holds when it updates: (rows, WIDTH) tensors of all groups."""

    groups: Groups
    policies: Setting
    correction: str

    @property
    def settings(self) -> RolloutCorrectionConfig:
        """Returns the correction's settings."""
        return CORRECTIONS[self.correction]

    def of_rows(self, per_episode: Tensor) -> Tensor:
        """Repeats the episodes' numbers for the rows of all groups."""
        return per_episode[self.groups.rows]

    def tensors(self) -> dict[str, Tensor]:
        """Makes the batch; with `old` the old log-probs are the sampler's, else the updated policy's."""
        new, sampled = (
            self.of_rows(WORLD.log_probs(x)) for x in (self.policies.updated, self.policies.sampler)
        )
        logits = (
            self.policies.sampler if self.correction == "old" else self.policies.updated
        ).log_softmax(-1)
        batch = {
            "token_level_rewards": self.of_rows(WORLD.rewards),
            "response_mask": self.of_rows(WORLD.mask),
            "turn_ids": self.of_rows(WORLD.turn_ids),
            "values": self.of_rows(WORLD.values(self.policies.sampler)),
            "log_probs": new,
            "rollout_log_probs": sampled,
            "old_log_probs": sampled if self.correction == "old" else new,
            "ref_log_prob": self.of_rows(WORLD.log_probs(self.policies.teacher)),
            "sum_pi_squared": self.of_rows((2 * logits).exp().sum(-1)[WORLD.contexts]),
            "reward_baselines": torch.full((len(self.groups.rows),), 0.7, dtype=torch.float64),
        }
        weights, batch["response_mask"], _ = correct_as(
            self.settings, new, sampled, batch["response_mask"]
        )
        if weights is not None:
            batch["rollout_is_weights"] = weights.batch["rollout_is_weights"]
        return batch


def advantages_of(name: str, batch: dict[str, Tensor], groups: Groups) -> Tensor:
    """Runs the estimator, of one batch a group where it looks beyond groups: (rows, WIDTH)."""
    estimator = name.split()[0]
    config = SimpleNamespace(
        gamma=1.0,
        turn_gamma=1.0,
        turn_lam=1.0,
        gigpo_step_weight=1.0,
        distillation_coef=1.0,
        distillation_task=None,
        gdpo_reward_keys=(),
        gdpo_reward_weights=(),
    )
    anchors = [EPISODES[row].states for row in groups.rows.tolist()]

    def of(rows: slice, index: np.ndarray) -> Tensor:
        given: dict[str, Any] = {key: tensor[rows] for key, tensor in batch.items()}
        given |= {"index": index, "role": np.full(len(index), "policy"), "anchors": anchors[rows]}
        given |= {
            "state": {"policy": 0.4},
            "non_tensor_batch": {},
            "config": config,
            "gamma": 1.0,
            "lam": 1.0,
        }
        return call_adv_estimator(estimator, **given, **VARIANTS.get(name, {}))[0]

    if estimator not in OF_BATCH:
        return of(slice(None), groups.index)
    starts = range(0, len(groups.rows), groups.size)
    return torch.cat(
        [of(slice(i, i + groups.size), groups.index[i : i + groups.size]) for i in starts]
    )


def loss_config(correction: RolloutCorrectionConfig) -> PolicyLossConfig:
    """Returns the losses' defaults; bypass_mode is the form whose weights correct, as the other is vanilla."""
    own = PolicyLossChoice(dro_beta=0.1)
    return PolicyLossConfig(
        policy_loss=own, rollout_correction=replace(correction, loss_type="reinforce")
    )


def token_gradients(loss: str, batch: dict[str, Tensor], advantages: Tensor, case: Case) -> Tensor:
    """Differentiates the sum of the tokens' losses with respect to their log-probs: (rows, WIDTH)."""
    function, config = core_algos.get_policy_loss_fn(loss), loss_config(case.settings)
    leaf = batch["log_probs"].clone().requires_grad_()
    bypass = loss == "bypass_mode"
    old = batch["rollout_log_probs" if bypass else "old_log_probs"]
    mask = case.of_rows(WORLD.mask) if bypass else batch["response_mask"]
    weights = None if bypass else batch.get("rollout_is_weights")
    if loss in CHOOSING:
        weights = torch.ones_like(old) if weights is None else weights
        return _of_draws(loss, (old, batch["log_probs"], advantages, mask, weights), case)
    value, _ = function(old, leaf, advantages, mask, "token-sum", config, weights)
    (gradient,) = torch.autograd.grad(value, leaf)
    # A mean over rows, of all groups: the sum over them is wanted.
    return gradient * mask.any(-1).sum() if loss in OWN_MODE else gradient


def _of_draws(loss: str, given: tuple[Tensor, ...], case: Case) -> Tensor:
    """Averages over every draw of a loss that draws a token of its micro-batch, group by group: (rows, WIDTH)."""
    function, config = core_algos.get_policy_loss_fn(loss), loss_config(case.settings)
    gradients, drawing = [], torch.randperm
    for own in zip(*(tensor.split(case.groups.size) for tensor in given), strict=True):
        counts: list[int] = []
        draws: list[Tensor] = []
        while not counts or len(draws) < counts[0]:

            def draw(
                count: int, turn: int = len(draws), seen: list[int] = counts, **_: Any
            ) -> Tensor:
                seen.append(count)
                return torch.arange(count).roll(-turn)

            torch.randperm = draw  # type: ignore[assignment]
            leaf = own[1].clone().requires_grad_()
            value, _ = function(own[0], leaf, *own[2:4], "token-sum", config, own[4])
            draws.append(torch.autograd.grad(value, leaf)[0])
            torch.randperm = drawing
            counts = counts or [1]
        gradients.append(torch.stack(draws).mean(0))
    return torch.cat(gradients)


def in_logits(per_token: Tensor, case: Case) -> Tensor:
    """Turns expected gradients by the tokens' log-probs into one by the updated logits: (rows, WIDTH) -> (6, 2)."""
    chances = case.groups.chances.repeat_interleave(case.groups.size)[:, None]
    of_episode = torch.zeros(WORLD.mask.shape, dtype=torch.float64)
    of_episode.index_add_(0, case.groups.rows, per_token * chances)
    leaf = case.policies.updated.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((WORLD.log_probs(leaf) * of_episode).sum(), leaf)
    return gradient


def true_gradient(estimator: str, policies: Setting) -> Tensor:
    """Is that of the expected reward; of distillation, that of the negative reverse KL of whole episodes: (6, 2)."""
    if estimator != "on_policy_distillation":
        return WORLD.expected(policies.updated)
    apart = WORLD.log_probs(policies.teacher) - WORLD.log_probs(policies.updated)
    return WORLD.expected(policies.updated, apart.sum(-1, keepdim=True))


def expected_gradient(estimator: str, loss: str, mode: str, case: Case) -> Tensor:
    """Computes the direction that an update moves in, the expected negative gradient of the loss: (6, 2)."""
    batch = case.tensors()
    advantages = advantages_of(estimator, batch, case.groups)
    mask = case.of_rows(WORLD.mask) if loss == "bypass_mode" else batch["response_mask"]
    weights = case.groups.weights(mask, "seq-mean-token-sum" if loss in OWN_MODE else mode)
    return -in_logits(token_gradients(loss, batch, advantages, case) * weights, case)


def compare(found: Tensor, true: Tensor) -> tuple[float, float]:
    """Returns the cosine between both, and how long the first is in lengths of the second."""
    if float(found.norm()) < 1e-12:
        return 0.0, 0.0
    return float((found * true).sum() / found.norm() / true.norm()), float(
        found.norm() / true.norm()
    )


def estimators() -> list[str]:
    """Lists the estimators, each once, with their variants behind them."""
    names = [name for name in ESTIMATOR_NEEDS if not name.endswith("_vectorized")]
    return [name for own in names for name in (own, *(v for v in VARIANTS if v.split()[0] == own))]


def cells(
    correction: str, stale: int
) -> Iterator[tuple[tuple[str, str, str], str, tuple[float, float]]]:
    """Yields (estimator, loss, correction), the aggregation and the comparison, of one form of correction."""
    case = Case(GROUPS, setting(stale), correction)
    batch = case.tensors()
    masks = {False: batch["response_mask"], True: case.of_rows(WORLD.mask)}
    weights = {
        (mode, own): GROUPS.weights(mask, mode) for mode in MODES for own, mask in masks.items()
    }
    for estimator in estimators():
        advantages, true = (
            advantages_of(estimator, batch, GROUPS),
            true_gradient(estimator, case.policies),
        )
        for loss in core_algos.POLICY_LOSS_REGISTRY:
            if loss in CHOOSING and (correction != "old" or estimator not in CHOOSING_WITH):
                continue
            gradients = token_gradients(loss, batch, advantages, case)
            for mode in MODES:
                weight = weights[
                    "seq-mean-token-sum" if loss in OWN_MODE else mode, loss == "bypass_mode"
                ]
                found = compare(-in_logits(gradients * weight, case), true)
                yield (estimator, loss, correction), mode, found


def compute() -> dict[tuple[str, str, str], dict[str, str]]:
    """Computes the whole table: (estimator, loss, correction) -> `MODE/STALE` -> `COSINE RATIO`."""
    table: dict[tuple[str, str, str], dict[str, str]] = {}
    for correction, stale in itertools.product(CORRECTIONS, range(STALE)):
        for key, mode, (cosine, ratio) in cells(correction, stale):
            table.setdefault(key, {})[f"{mode}/{stale}"] = f"{cosine:.3f} {ratio:.2f}"
        print(f"{correction}, {stale} updates old: {len(table)} rows", flush=True)
    return table


def write(table: dict[tuple[str, str, str], dict[str, str]]) -> None:
    """Writes the CSV."""
    columns = [f"{mode}/{stale}" for mode in MODES for stale in range(STALE)]
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["estimator", "loss", "correction", *columns])
        writer.writerows(
            [*key, *(row[column] for column in columns)] for key, row in sorted(table.items())
        )


def page_tables(table: dict[tuple[str, str, str], dict[str, str]]) -> str:
    """Draws the short tables: estimators with vanilla, losses with grpo, corrections with grpo and vanilla."""
    columns = [
        f"{mode}/{stale}" for mode in ("token-mean", "seq-mean-token-sum") for stale in (0, 2)
    ]
    parts: dict[str, Callable[[tuple[str, str, str]], bool]] = {
        "estimator, with vanilla": lambda key: key[1:] == ("vanilla", "old"),
        "loss, with grpo": lambda key: key[0] == "grpo" and key[2] == "old",
        "correction, with rloo and gpg": lambda key: key[:2] == ("rloo", "gpg"),
    }
    lines = []
    for place, (title, belongs) in enumerate(parts.items()):
        lines += [
            "",
            f"| {title} | " + " | ".join(c.replace("/", ", ") + " old" for c in columns) + " |",
        ]
        lines += ["|---" * (len(columns) + 1) + "|"]
        rows = [(key, row) for key, row in table.items() if belongs(key)]
        lines += [
            f"| {key[place]} | " + " | ".join(row[column] for column in columns) + " |"
            for key, row in rows
        ]
    return "\n".join(lines).strip()


def main() -> None:
    """Computes, writes the file, and puts the short tables between their marks in the docs."""
    table = compute()
    write(table)
    begin, end = "<!-- bias-table -->", "<!-- /bias-table -->"
    text = f"{begin}\n{page_tables(table)}\n{end}"
    PAGE.write_text(re.sub(f"{begin}.*?{end}", lambda _: text, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    assert set(MODES) < set(LOSS_AGG_MODES)
    main()
