"""The critic's loss: the clipped regression of values on returns.

Invariant: the loss is pure, and predictions of masked tokens reach neither it nor its gradient.
"""

from typing import Unpack

import torch
from torch import Tensor

from training.core_algos.aggregation import (
    GlobalBatchInfo,
    LossAggMode,
    aggregate,
    mean_of_tokens,
)
from training.core_algos.masked_ops import clip_by_value


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: LossAggMode = "token-mean",
    row_weights: Tensor | None = None,
    **counts: Unpack[GlobalBatchInfo],
) -> tuple[Tensor, Tensor]:
    """Computes half the squared error of the predicted values, clipped as PPO's ratio is.

    0.5 max((V - R)^2, (V_clipped - R)^2) with V_clipped = V kept within cliprange_value of the old
    value.

    Args:
        vpreds, returns, values, response_mask: (batch, response_len); `values` are the predictions
            before the update.
        cliprange_value: how far, in units of value, a prediction may move from `values` before its
            gradient stops.
        row_weights: (batch,) as of `aggregate`.
        counts: the denominators of `aggregate`.
    Returns:
        loss and detached fraction of tokens where the clipped error was the larger, both 0-dim;
        both are 0 over an empty mask.
    """
    vpreds = torch.where(response_mask.bool(), vpreds, 0)
    clipped_vpreds = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    error = (vpreds - returns) ** 2
    clipped_error = (clipped_vpreds - returns) ** 2
    token_losses = torch.maximum(error, clipped_error)
    loss = 0.5 * aggregate(
        token_losses, response_mask, loss_agg_mode, **counts, row_weights=row_weights
    )
    clip_fraction = mean_of_tokens(clipped_error > error, response_mask, counts)
    return loss, clip_fraction
