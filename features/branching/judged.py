"""Judges a batch: what estimators give each turn, beside what continuations of it earned.

Invariant: an episode of which a turn cannot be judged is left out whole, with its reason counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from custom.env_calls import describe
from data.array_ops import object_array
from data.plain_state import plain_copy
from data.protocol import DataProto
from features.branching.agreement import group_sums
from features.branching.counts import BRANCHES, branch_metrics
from features.branching.credit import LEAST_SAMPLES, BranchedEpisode, JudgedTurns
from training.advantage import compute_advantage
from training.batch.episode_rows import EpisodeRows
from training.ray_trainer import RayPPOTrainer
from training.step_phases import READ_FROM_POLICY

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class JudgedBatch:
    """Holds the judged episodes of a batch, as plain data.

    Attributes:
        step: that seeds it.
        episodes: the arguments of a `BranchedEpisode` of each.
        texts: of each episode what the policy wrote, by turn.
        credit: by estimator what it gives each turn, the episodes' turns one behind the other.
        failed: by estimator why it could not be judged.
        states: by estimator what it keeps for the next batch, where it keeps anything.
        left_out: by reason, how many episodes are left out.
        continuations: how many were played; dropped: how many of them do not count.
        own_tokens, branch_tokens: sampled by episodes and by continuations.
        prefilled_tokens: of the prompts that continuations began with.
    """

    step: int
    episodes: list[dict[str, Any]]
    texts: list[list[str]]
    credit: dict[str, list[float]]
    failed: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    continuations: int = 0
    dropped: int = 0
    own_tokens: int
    branch_tokens: int
    prefilled_tokens: int


def judge_batch(
    trainer: RayPPOTrainer,
    batch: DataProto,
    estimators: Sequence[str],
    samples: int,
    states: Mapping[str, Mapping[str, Any]],
) -> JudgedBatch:
    """Judges the estimators on a batch that was played.

    Args:
        samples: continuations of a state that measure its credit; what there is beyond them is
            what estimators are given that read continuations.
        states: by estimator what it kept of the batches before.

    An estimator that raises, or whose numbers are no advantages, has no credit and a reason.
    """
    batch = add_what_estimators_read(trainer, batch)
    facts = [each for each in batch.non_tensor_batch["episode_facts"] if each is not None]
    episodes, texts, left_out = read_episodes(batch, samples)
    credit: dict[str, list[float]] = {name: [] for name in estimators}
    failed: dict[str, str] = {}
    kept = {name: dict(states[name]) for name in estimators if name in states}
    if episodes:
        turns = JudgedTurns.of(episodes, trainer.config.algorithm.turn_gamma)
        given = with_further_returns(batch, samples)
        for name in estimators:
            state = deepcopy(dict(states.get(name, {})))
            try:
                given_credit = credit_by(name, given, turns, trainer, state)
                # Raises where the numbers are too large to be judged.
                group_sums(given_credit, turns)
                if state:
                    kept[name] = plain_copy(state, f"the state of estimator {name}")
                credit[name] = given_credit.tolist()
            # A user's formula may raise anything, which costs it its own judgement alone.
            except Exception as error:
                failed[name] = describe(error)
                logger.warning("estimator %s cannot be judged: %s", name, failed[name])
    counts = branch_metrics(facts)
    own = sum(each["sampled_tokens"] for each in facts)
    return JudgedBatch(
        step=int(batch.meta_info["global_steps"]),
        episodes=[vars(episode) for episode in episodes],
        texts=texts,
        credit=credit,
        failed=failed,
        states=kept,
        left_out=dict(left_out),
        continuations=int(counts["branching/continuations"]),
        dropped=int(counts["branching/left_out"]),
        own_tokens=int(own),
        branch_tokens=int(counts["branching/sampled_tokens"]),
        prefilled_tokens=int(counts["branching/prefilled_tokens"]),
    )


def add_what_estimators_read(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """Scores a batch and adds what a step's phases add before advantages, in their order."""
    phases = trainer.phases
    batch = phases.arrange(batch)
    wait_for_reward = phases.start_reward(batch)
    if not READ_FROM_POLICY.isdisjoint(trainer.config.estimator_needs):
        batch, _ = phases.add_old_log_probs(batch)
    if phases.needs_reference():
        batch = batch.union(trainer.ref_policy_wg.compute_ref_log_prob(batch))
    if trainer.critic_wg is not None:
        batch = batch.union(trainer.critic_wg.compute_values(batch))
    scores, infos = wait_for_reward()
    batch = phases.add_rewards(batch, scores, infos)
    phases.apply_kl_penalty(batch)
    return batch


def credit_by(
    name: str,
    batch: DataProto,
    turns: JudgedTurns,
    trainer: RayPPOTrainer,
    state: dict[str, Any],
) -> Any:
    """Returns what an estimator gives each turn, on average over its tokens: (turns,) float64.

    Args:
        state: the estimator's own, which it changes.
    """
    algorithm = trainer.config.algorithm
    # A formula that writes in place writes into what is its own.
    judged = compute_advantage(
        batch.select(deepcopy=True),
        name,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=trainer.config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        config=algorithm,
        state=state,
    )
    return turns.credit_of(
        judged.batch["advantages"].numpy(),
        trained_turns(batch).numpy(),
        batch.non_tensor_batch["episode_id"].tolist(),
    )


def trained_turns(batch: DataProto) -> torch.Tensor:
    """Returns the turn of each token that is trained on, -1 elsewhere: (B, R)."""
    is_trained = batch.batch["response_mask"].bool()
    return torch.where(is_trained, batch.batch["turn_ids"], -1)


def read_episodes(
    batch: DataProto, samples: int
) -> tuple[list[BranchedEpisode], list[list[str]], Counter[str]]:
    """Reads the episodes that can be judged.

    Returns: them; what the policy wrote in them by turn; and the reasons of the others, counted.
    """
    columns = batch.non_tensor_batch
    episodes = []
    texts = []
    left_out: Counter[str] = Counter()
    turns = trained_turns(batch)
    rows_of = EpisodeRows(batch, by_conversation=False)
    for rows in rows_of.rows:
        facts: Mapping[str, Any] | None = columns["episode_facts"][rows[0]]
        if facts is None:
            # A dummy row.
            continue
        trained = {int(turn) for row in rows for turn in turns[row].unique() if turn >= 0}
        reason = why_left_out(facts, trained)
        if reason:
            left_out[reason] += 1
            continue
        branches = facts[BRANCHES]
        episodes.append(
            BranchedEpisode(
                episode_id=str(columns["episode_id"][rows[0]]),
                group=str(columns["uid"][rows[0]]),
                rewards=branches["rewards"],
                tokens=branches["tokens"],
                returns=[even_part(returns, samples) for returns in branches["returns"]],
            )
        )
        texts.append(branches["texts"])
    # Rows lie otherwise on several ranks, and what is drawn for intervals follows this order.
    order = sorted(range(len(episodes)), key=lambda number: episodes[number].episode_id)
    return [episodes[each] for each in order], [texts[each] for each in order], left_out


def why_left_out(facts: Mapping[str, Any], trained: set[int]) -> str:
    """Says why an episode cannot be judged; "": it can.

    Args:
        trained: the numbers of its turns that are trained on.
    """
    if facts["masked"]:
        return f"ended as {facts['ending']}, and the failure policy leaves it out"
    if BRANCHES not in facts:
        return "has no turn"
    branches = facts[BRANCHES]
    if branches["refused"]:
        return f"a state could not be taken: {branches['reasons'][0]}"
    if any(len(returns) < LEAST_SAMPLES for returns in branches["returns"]):
        reasons = branches["reasons"] or ["none was played"]
        return f"a turn has fewer than {LEAST_SAMPLES} continuations: {reasons[0]}"
    if trained != set(range(len(branches["returns"]))):
        return "has turns that are not trained on"
    return ""


def even_part(returns: Sequence[float], samples: int) -> list[float]:
    """Returns as many of the first returns as measure credit: an even number of them."""
    count = min(len(returns), samples)
    return list(returns[: count - count % 2])


def with_further_returns(batch: DataProto, samples: int) -> DataProto:
    """Returns a batch whose estimators see continuations that measure nothing.

    What measures the credit is not what an estimator makes its own of.
    """
    columns = dict(batch.non_tensor_batch)
    of_rows = [
        [list(returns[samples:]) for returns in of_turns]
        for of_turns in columns.pop("branch_returns")
    ]
    columns["branch_returns"] = object_array(of_rows)
    return replace(batch, non_tensor_batch=columns)
