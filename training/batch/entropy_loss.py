"""The entropy of logits as a loss: a name of verl's, which no run of ours calls.

Invariant: the entropy is that of head.py, aggregated as every loss is.
"""

from typing import Unpack

from torch import Tensor

from training.batch.head import entropy_from_logits
from training.core_algos.aggregation import GlobalBatchInfo, LossAggMode
from training.core_algos.verl_form import agg_loss


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> Tensor:
    """Aggregates the policy's entropy in nats as `agg_loss` does.

    Args:
        logits: (batch, response_len, vocabulary).
        response_mask: (batch, response_len).
        counts: the denominators of `agg_loss`.
    """
    entropy = entropy_from_logits(logits)  # (batch, response_len)
    return agg_loss(entropy, response_mask, loss_agg_mode, **counts)
