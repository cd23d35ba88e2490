"""Why each token of a step was, or was not, trained on.

It is decided from what happened: where the token came from, the mask before and after correction,
what the update made of it (features/records/token_record.py). Invariant: every token has one fate,
and `trained` says that the last pass over its row gave its log-prob a gradient, in an update that
was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from features.records.token_origins import (
    COPIED,
    ENVIRONMENT,
    OVER_LIMIT,
    SAMPLED,
    TEMPLATE,
    UNTRAINED,
)
from training.config import RolloutCorrectionConfig
from training.core_algos import correct_as


class Fate(NamedTuple):
    """Describes a fate: its code in files, its name, and what it says of a token."""

    code: int
    name: str
    sentence: str


# In the files of a run: a code keeps its meaning.
FATES = (
    Fate(0, "trained", "The loss moved this token's log-prob."),
    Fate(1, "environment", "The environment wrote it: it is read, and not learnt."),
    Fate(2, "template", "The chat template added it between turns: nobody chose it."),
    Fate(3, "rejected", "Rollout correction left it out: engine and trainer are too far apart."),
    Fate(4, "clipped", "The loss gave it no gradient though it has an advantage: it was clipped."),
    Fate(5, "over_limit", "It ends a turn that a limit cut: it was added, and not sampled."),
    Fate(6, "no_spread", "Every episode of its group has the same score, so its advantage is 0."),
    Fate(7, "zero_advantage", "Its advantage is 0: there was nothing to learn from it."),
    Fate(8, "masked_failure", "Its episode failed, and agent.on_failure leaves failures out."),
    Fate(9, "stale", "A token of its group is of weights older than trainer.async_level allows."),
    Fate(10, "filtered", "Its group's rewards do not differ: algorithm.filter_groups left it out."),
    Fate(11, "not_drawn", "use_pf_ppo draws rows by their scores, and did not draw this one."),
    Fate(12, "warmup", "Only the critic learns in the first trainer.critic_warmup steps."),
    Fate(13, "skipped", "Its mini-batch's gradient was not finite, so the update was skipped."),
    Fate(14, "dummy", "The row only pads the batch to the ranks."),
    Fate(15, "observed", "The environment wrote it; agent.observation_loss_coef has it learnt."),
    Fate(16, "surplus", "The step had enough groups that differ without its own."),
    Fate(17, "masked", "Its mask was set to 0 by code that this record does not know."),
    Fate(18, "copied", "Its row begins with another one's tokens: it counts in that row alone."),
    Fate(19, "untrained", "Its turn, such as a summary, is one that the config leaves untrained."),
)
BY_NAME = {fate.name: fate for fate in FATES}


def code_of(name: str) -> int:
    """Returns a fate's code."""
    return BY_NAME[name].code


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """Holds what fates are decided by: arrays with an entry a token (T,), or a row (n,).

    Attributes:
        rows: (T,) the row of each token.
        origins: (T,) int8, see features/records/token_origins.py.
        response_mask: (T,) as the loss saw it.
        advantages: (T,).
        policy_weight: (T,); None: the update recorded none.
        turn_ids: (T,) of the rows as they are trained on: -1 in masked rows.
        weights_are_zero: (T,) bool, the importance weight is 0.
        is_rejected_in_loss: (T,) bool, correction within the loss leaves the token out.
        times_trained: (n,); None: not known.
        is_skipped: (n,) bool, the update of the last pass over the row was skipped.
        is_stale: (n,) bool.
        has_no_spread: (n,) bool, the scores of the row's group are equal.
        corrects: rollout correction may leave tokens out.
        updates_policy: false while only the critic learns.
    """

    rows: np.ndarray
    origins: np.ndarray
    response_mask: np.ndarray
    advantages: np.ndarray
    policy_weight: np.ndarray | None
    turn_ids: np.ndarray
    weights_are_zero: np.ndarray
    is_rejected_in_loss: np.ndarray
    times_trained: np.ndarray | None
    is_skipped: np.ndarray
    is_stale: np.ndarray
    has_no_spread: np.ndarray
    corrects: bool
    updates_policy: bool


def token_fates(step: StepTokens) -> np.ndarray:
    """Decides each token's fate: (T,) uint8. The first rule that fits counts."""
    in_loss = step.response_mask.astype(bool)
    return np.where(in_loss, _fates_in_loss(step), _fates_outside(step))


def _fates_in_loss(step: StepTokens) -> np.ndarray:
    """Decides the fates of tokens that the loss saw."""
    has_gradient = step.advantages != 0
    if step.policy_weight is not None:
        has_gradient = step.policy_weight != 0
    # Not NaN: a loss may give a token a weight that is no number.
    is_zero = step.advantages == 0
    not_drawn = np.zeros(len(step.rows), bool)
    if step.times_trained is not None:
        not_drawn = (step.times_trained == 0)[step.rows]
    rules = [
        (np.full(len(step.rows), not step.updates_policy), "warmup"),
        (not_drawn, "not_drawn"),
        (step.is_skipped[step.rows], "skipped"),
        (has_gradient, "trained"),
        (is_zero & step.has_no_spread[step.rows], "no_spread"),
        (is_zero, "zero_advantage"),
        (step.weights_are_zero | step.is_rejected_in_loss, "rejected"),
    ]
    return _first_that_fits(rules, otherwise="clipped")


def _fates_outside(step: StepTokens) -> np.ndarray:
    """Decides the fates of tokens that the loss's mask leaves out."""
    is_sampled = step.origins == SAMPLED
    is_observed = np.zeros(len(step.rows), bool)
    if step.policy_weight is not None and step.updates_policy:
        is_observed = (step.policy_weight != 0) & ~step.is_skipped[step.rows]
    rules = [
        (~is_sampled & is_observed, "observed"),
        (step.origins == OVER_LIMIT, "over_limit"),
        (step.origins == TEMPLATE, "template"),
        (step.origins == ENVIRONMENT, "environment"),
        (step.origins == COPIED, "copied"),
        (step.origins == UNTRAINED, "untrained"),
        (step.turn_ids < 0, "masked_failure"),
        (step.is_stale[step.rows], "stale"),
        (np.full(len(step.rows), step.corrects), "rejected"),
    ]
    return _first_that_fits(rules, otherwise="masked")


def _first_that_fits(rules: list[tuple[np.ndarray, str]], otherwise: str) -> np.ndarray:
    """Returns the code of the first rule that is true of each token."""
    codes = np.full(len(rules[0][0]), code_of(otherwise), np.uint8)
    for condition, name in reversed(rules):
        codes[condition] = code_of(name)
    return codes


def rejected_in_loss(
    correction: RolloutCorrectionConfig,
    log_prob: np.ndarray,
    rollout_log_probs: np.ndarray,
    response_mask: np.ndarray,
) -> np.ndarray:
    """Tells which tokens bypass_mode's loss left out, by the log-probs of its pass: (rows, R)."""
    mask = torch.from_numpy(response_mask).bool()
    _, kept, _ = correct_as(
        correction, torch.from_numpy(log_prob), torch.from_numpy(rollout_log_probs), mask
    )
    return (mask & ~kept.bool()).numpy()
