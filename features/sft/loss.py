"""The loss of supervised training: the mean cross-entropy of the learnt tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from training import core_algos as algos
from training.batch.head import BANNED
from training.core_algos import GlobalBatchInfo

# The name of the metric.
LOSS = "actor/sft_loss"


def cross_entropy(log_prob: Tensor, mask: Tensor, counts: GlobalBatchInfo) -> Tensor:
    """Returns a micro-batch's share of the mean of -log p over all learnt tokens of an update.

    Tokens that are never sampled, which no policy can learn, add nothing.

    Args:
        log_prob, mask: (rows, response_len), of the tokens and 1 on those that are learnt.
        counts: of the whole update over all ranks.
    Returns: 0-dim, nats a token, times the number of ranks, because ranks average their gradients.
    """
    # One that is not a number is no token that is never sampled.
    learnt = mask.bool() & ~(log_prob <= BANNED / 2)
    losses = -torch.where(learnt, log_prob, 0)
    return algos.aggregate(losses, learnt, "token-mean", **counts)
