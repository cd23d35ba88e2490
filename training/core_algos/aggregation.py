"""How token losses become one number, and which denominators they are divided by.

Every denominator is an explicit argument. With the counts of the whole mini-batch a loss does not
depend on how that was split into micro-batches or over ranks:

    micro-batches of 3 and 1 tokens:   sum(losses) / 4   each, and their sum is the token mean

Invariant: masked tokens change nothing, and a batch without tokens has loss 0 with a gradient path.
"""

from collections.abc import Mapping
from typing import Any, TypedDict, get_args

import torch
from torch import Tensor

from data.names import unknown_name
from training.core_algos.loss_settings import LossAggMode

LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)


class GlobalBatchInfo(TypedDict, total=False):
    """Counts the whole mini-batch, all micro-batches and ranks together, for `aggregate`.

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


def aggregate(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: LossAggMode | None,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    row_weights: Tensor | None = None,
) -> Tensor:
    """Turns token losses into a scalar, times dp_size because ranks average their gradients.

    Args:
        loss_mat, loss_mask: (batch, response_len).
        loss_agg_mode: None is token-mean.

            - token-mean: sum over tokens / batch_num_tokens.
            - token-sum: sum over tokens.
            - seq-mean-token-sum, seq-mean-token-mean: each sequence's sum or mean, summed
                / global_batch_size.
            - seq-mean-token-sum-norm: seq-mean-token-sum / loss_scale_factor (default: response_len
                of this very tensor).
        batch_num_tokens, global_batch_size: tokens, and sequences with any token, of the whole
            mini-batch over all ranks. With them, the losses of micro-batches sum to the
            mini-batch's. By default they are `loss_mask`'s.
        row_weights: (batch,) the share of its episode's sampled tokens that each row has; a mean
            over a row's tokens then counts as much. None: 1 each. `global_batch_size` counts the
            same shares.
    Returns: 0-dim; 0 with a gradient path where nothing is masked in.
    Raises:
        ValueError: the mode is unknown, or dp_size > 1 and the count that the mode divides by is
            missing.
    """
    if loss_agg_mode is None:
        loss_agg_mode = "token-mean"
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    mask = loss_mask.bool()
    token_losses = torch.where(mask, loss_mat, 0)
    if loss_agg_mode == "token-sum":
        return token_losses.sum() * dp_size
    if loss_agg_mode == "token-mean":
        tokens = _denominator("batch_num_tokens", batch_num_tokens, dp_size, counted=mask)
        return token_losses.sum() / tokens * dp_size

    has_tokens = mask.any(-1)
    sequences = _denominator("global_batch_size", global_batch_size, dp_size, counted=has_tokens)
    if loss_agg_mode == "seq-mean-token-mean":
        row_losses = token_losses.sum(-1) / mask.sum(-1).clamp(min=1)
        if row_weights is not None:
            row_losses = row_losses * row_weights
        return row_losses.sum() / sequences * dp_size
    scale = 1.0
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    return token_losses.sum() / sequences / scale * dp_size


def mean_of_tokens(per_token: Tensor, mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
    """Averages a number over tokens, detached.

    With global counts, the results of micro-batches add up to the mini-batch's mean.

    Args:
        per_token, mask: (batch, response_len); of a condition the mean is the share of tokens that
            meet it.
        counts: the mini-batch's, as of `GlobalBatchInfo`; without its tokens `mask`'s count.
    Returns: 0-dim float32.
    """
    sampled = mask.bool()
    tokens = _denominator(
        "batch_num_tokens", counts.get("batch_num_tokens"), dp_size=1, counted=sampled
    )
    return torch.where(sampled, per_token.detach().float(), 0).sum() / tokens


def _denominator(name: str, count: float | Tensor | None, dp_size: int, counted: Tensor) -> Tensor:
    """Returns the count, by default what is true in `counted`; 1 where it is 0, 0-dim."""
    if count is None and dp_size > 1:
        raise ValueError(
            f"dp_size={dp_size} needs {name}, the count over all ranks: "
            "a rank cannot know it by itself"
        )
    total = counted.count_nonzero() if count is None else torch.as_tensor(count)
    # Not a clamp: a mini-batch may have a part of an episode.
    return torch.where(total > 0, total, 1)
