"""How token losses become one number: the modes of aggregation and their denominators.

Invariant: every denominator is an explicit argument, so that with the counts of the whole mini-batch a loss does not
depend on how that was split into micro-batches or over ranks; masked tokens change nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor

from data.names import unknown_name
from training.config.algorithm_settings import LossAggMode

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


class GlobalBatchInfo(TypedDict, total=False):
    """Counts the whole mini-batch, all micro-batches and ranks together: the denominators of `agg_loss`.

    Attributes:
        dp_size: data-parallel ranks whose gradients are averaged.
        batch_num_tokens: tokens with mask 1.
        global_batch_size: sequences with any such token; one of several rows is one.
        loss_scale_factor: tokens, for seq-mean-token-sum-norm.
    """

    dp_size: int
    batch_num_tokens: int | Tensor | None
    global_batch_size: float | Tensor | None
    loss_scale_factor: float | None


# The counts of the mini-batch whose loss is being computed, for losses that hand none on, and its rows' weights.
_RUNNING: ContextVar[tuple[GlobalBatchInfo, Tensor | None] | None] = ContextVar("running mini-batch", default=None)


@contextmanager
def denominators(counts: GlobalBatchInfo, row_weights: Tensor | None = None) -> Iterator[None]:
    """Has every `agg_loss` inside that is given no counts divide by these.

    Args:
        row_weights: (batch,) the share of its episode's sampled tokens that each row has; a mean over a row's tokens
            then counts as much. None: 1 each. `global_batch_size` counts the same shares.
    """
    before = _RUNNING.set((counts, row_weights))
    try:
        yield
    finally:
        _RUNNING.reset(before)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: LossAggMode,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Turns token losses into a scalar, times dp_size because ranks average their gradients.

    Args:
        loss_mat, loss_mask: (batch, response_len).
        loss_agg_mode:
            token-mean: sum over tokens / batch_num_tokens.
            token-sum: sum over tokens.
            seq-mean-token-sum, seq-mean-token-mean: each sequence's sum or mean, summed / global_batch_size.
            seq-mean-token-sum-norm: seq-mean-token-sum / loss_scale_factor (default: response_len of this very tensor).
        batch_num_tokens, global_batch_size: tokens, and sequences with any token, of the whole mini-batch over all
            ranks. With them, the losses of micro-batches sum to the mini-batch's. A loss that an update calls, and
            that gives neither them nor dp_size, gets those of the update; elsewhere they default to `loss_mask`'s.
        row_weights: as of `denominators`; None: those of the update.
    Returns: 0-dim; 0 with a gradient path where nothing is masked in.
    Raises: ValueError for an unknown mode, or when dp_size > 1 and the count that the mode divides by is missing.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    running, own_weights = _RUNNING.get() or (None, None)
    row_weights = own_weights if row_weights is None else row_weights
    if running and dp_size == 1 and batch_num_tokens is None and global_batch_size is None:
        dp_size, batch_num_tokens = running["dp_size"], running["batch_num_tokens"]
        global_batch_size, loss_scale_factor = running["global_batch_size"], running["loss_scale_factor"]
    mask = loss_mask.bool()
    masked = torch.where(mask, loss_mat, 0)
    if loss_agg_mode == "token-sum":
        return masked.sum() * dp_size
    if loss_agg_mode == "token-mean":
        return masked.sum() / _denominator("batch_num_tokens", batch_num_tokens, dp_size, mask) * dp_size
    sequences = _denominator("global_batch_size", global_batch_size, dp_size, mask.any(-1))
    if loss_agg_mode == "seq-mean-token-mean":
        means = masked.sum(-1) / mask.sum(-1).clamp(min=1)
        return (means if row_weights is None else means * row_weights).sum() / sequences * dp_size
    norm = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    scale = norm if loss_agg_mode == "seq-mean-token-sum-norm" else 1.0
    return masked.sum() / sequences / scale * dp_size


def whole_counts(mask: Tensor, counts: Mapping[str, Any]) -> tuple[GlobalBatchInfo, Tensor | None]:
    """Completes what `agg_loss` divides by, so that `mask`'s rows can be cut, and says what they weigh in an update."""
    running, row_weights = _RUNNING.get() or ({}, None)
    known = {name: count for given in (running, counts) for name, count in given.items() if count is not None}
    own = {"batch_num_tokens": mask.count_nonzero(), "global_batch_size": mask.any(-1).count_nonzero()}
    # Of several ranks no rank knows them all.
    return {**(own if known.get("dp_size", 1) == 1 else {}), **known}, row_weights  # type: ignore[typeddict-item]


def _denominator(name: str, count: float | Tensor | None, dp_size: int, counted: Tensor) -> Tensor:
    if count is None and dp_size > 1:
        raise ValueError(f"dp_size={dp_size} needs {name}, the count over all ranks: a rank cannot know it by itself")
    total = counted.count_nonzero() if count is None else torch.as_tensor(count)
    # A mini-batch may have a part of an episode.
    return torch.where(total > 0, total, 1)


def token_fraction(per_token: Tensor, mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
    """Averages a number over tokens, detached; with global counts, micro-batches and ranks add up to the mini-batch's.

    Args:
        per_token, mask: (batch, response_len); of a condition the mean is the share of tokens that meet it.
        counts: the mini-batch's, as of `GlobalBatchInfo`.
    """
    local_counts: GlobalBatchInfo = {**whole_counts(mask, counts)[0], "dp_size": 1}
    return agg_loss(per_token.detach().float(), mask, "token-mean", **local_counts)
