"""Rollout correction on batches, under the name that verl's users know; the maths is core_algos'.

Invariant: numbers are those of training/core_algos/rollout_correction.py; `apply_correction` alone
changes what it is given.
"""

from typing import Any

import torch
from torch import Tensor

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.config import RolloutCorrectionConfig
from training.core_algos.offpolicy_metrics import Metrics
from training.core_algos.offpolicy_metrics import (
    compute_offpolicy_metrics as compute_offpolicy_metrics,
)
from training.core_algos.rollout_correction import REJECTIONS as REJECTIONS
from training.core_algos.rollout_correction import (
    SUPPORTED_ROLLOUT_RS_OPTIONS as SUPPORTED_ROLLOUT_RS_OPTIONS,
)
from training.core_algos.rollout_correction import (
    compute_rollout_correction_weights as compute_rollout_correction_weights,
)
from training.core_algos.rollout_correction import (
    compute_rollout_rejection_mask as compute_rollout_rejection_mask,
)
from training.core_algos.rollout_correction import correct_as as correct_as
from training.core_algos.rollout_correction import rejection_limits as rejection_limits


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    episodes: Tensor | None = None,
    **settings: Any,
) -> tuple[DataProto | None, Tensor, Metrics]:
    """Weighs and rejects, each where it is asked for.

    Args:
        old_log_prob, rollout_log_prob, response_mask: (batch, response_len); the trainer's and the
            engine's, nats.
        episodes: (batch,) int64, each row's episode from 0 on; None: every row is one.
        settings: rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs,
            rollout_rs_threshold as of `compute_rollout_correction_weights` and
            `compute_rollout_rejection_mask`; rollout_token_veto_threshold: an episode is left out
            where a token's ratio is below it.
    Returns: a DataProto with `rollout_is_weights`, or None; the mask; and metrics as
        `rollout_corr/NAME`.
    """
    config = RolloutCorrectionConfig(**settings)
    weights, mask, metrics = correct_as(
        config, old_log_prob, rollout_log_prob, response_mask, episodes
    )
    if weights is None:
        return None, mask, metrics
    return DataProto.from_dict(tensors={"rollout_is_weights": weights}), mask, metrics


def apply_correction(batch: DataProto, correction: RolloutCorrectionConfig) -> Metrics:
    """Weighs and rejects the batch's tokens, in place, as `algorithm.rollout_correction` says.

    Sequences are episodes, of any number of rows. Writes `response_mask` and, where tokens are
    weighed, `rollout_is_weights`.

    Returns: metrics as `rollout_corr/NAME`.
    """
    episodes = EpisodeRows(batch)
    numbers = None
    if not episodes.one_row_each:
        numbers = episodes.of_rows(torch.arange(len(episodes.rows)))
    weights, mask, metrics = correct_as(
        correction,
        old_log_prob=batch.batch["old_log_probs"],
        rollout_log_prob=batch.batch["rollout_log_probs"],
        response_mask=batch.batch["response_mask"],
        episodes=numbers,
    )
    batch.batch["response_mask"] = mask
    if weights is not None:
        batch.batch["rollout_is_weights"] = weights
    return metrics
