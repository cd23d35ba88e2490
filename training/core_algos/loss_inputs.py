"""What a policy loss is computed from: the tensors, settings and counts of one micro-batch.

A formula takes `LossInputs` and returns (loss, metrics):

    loss: 0-dim, this micro-batch's share of the mini-batch's; 0 with a gradient path where nothing
        is masked in.
    metrics: detached, 0-dim: actor/ppo_kl (mean of old - new), actor/pg_clipfrac (the share of
        tokens whose gradient is cut), actor/pg_clipfrac_lower (of those that reach the bound where
        advantages are negative).

`policy_loss` (verl_form.py) registers it, and gives it verl's arguments for those who call it so.

Invariant: the log-probs of masked tokens reach neither the loss nor its gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from training.core_algos.aggregation import (
    GlobalBatchInfo,
    LossAggMode,
    aggregate,
    mean_of_tokens,
)
from training.core_algos.kl import MAX_LOG_RATIO

Loss = tuple[Tensor, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Holds the micro-batch that a loss is computed from.

    Attributes:
        old_log_prob, log_prob: (batch, response_len) nats, masked tokens too.
        advantages: (batch, response_len).
        mask: (batch, response_len) bool, true on tokens that the policy sampled.
        loss_agg_mode: how token losses become one number.
        config: `PolicyLossConfig`, or anything with its fields.
        importance_weights: (batch, response_len) that multiply each token's loss, or None.
        rollout_log_prob: (batch, response_len) nats, the engine's; None: they are not there.
        counts: the mini-batch's, which the loss and its metrics are divided by.
        row_weights: (batch,) as of `aggregate`, or None.
    """

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    loss_agg_mode: LossAggMode
    config: Any
    importance_weights: Tensor | None
    rollout_log_prob: Tensor | None = None
    counts: GlobalBatchInfo = field(default_factory=GlobalBatchInfo)
    row_weights: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """Returns log pi - log pi_old, within +-20; 0 and without gradient where masked.

        Read it outside `torch.no_grad` first: it is computed once, and so is its graph.
        """
        # Masked before the exponential, so that padding's log-probs reach neither the loss nor its
        # gradient.
        log_ratio = torch.where(self.mask, self.log_prob - self.old_log_prob, 0)
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def clip_range(self) -> tuple[float, float]:
        """Returns how far a ratio may be below 1, and above."""
        low = self.config.clip_ratio_low
        high = self.config.clip_ratio_high
        if low is None:
            low = self.config.clip_ratio
        if high is None:
            high = self.config.clip_ratio
        return low, high

    def row_mean(self, per_token: Tensor) -> Tensor:
        """Averages over each row's sampled tokens: (batch, response_len) -> (batch, 1)."""
        lengths = self.mask.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(self.mask, per_token, 0).sum(-1, keepdim=True) / lengths

    def fraction(self, per_token: Tensor) -> Tensor:
        """Averages over the mini-batch's tokens, detached; see `mean_of_tokens`."""
        return mean_of_tokens(per_token, self.mask, self.counts)

    def aggregate(
        self,
        token_losses: Tensor,
        clipped: Tensor | None = None,
        clipped_lower: Tensor | None = None,
    ) -> Loss:
        """Aggregates token losses, times the importance weights, and makes the metrics.

        Args:
            token_losses: (batch, response_len).
            clipped: (batch, response_len) bool, tokens whose gradient is cut; None: the loss never
                cuts one, and has no such metrics.
            clipped_lower: (batch, response_len) bool, of tokens with negative advantages those that
                reach the loss's upper bound; None: there is no such bound.
        """
        if self.importance_weights is not None:
            token_losses = token_losses * self.importance_weights
        metrics: dict[str, Any] = {}
        if clipped is not None:
            metrics["actor/pg_clipfrac"] = self.fraction(clipped)
        metrics["actor/ppo_kl"] = self.fraction(-self.log_ratio)
        if clipped is not None:
            if clipped_lower is None:
                clipped_lower = torch.zeros_like(clipped)
            metrics["actor/pg_clipfrac_lower"] = self.fraction(clipped_lower)
        loss = aggregate(
            token_losses,
            self.mask,
            self.loss_agg_mode,
            **self.counts,
            row_weights=self.row_weights,
        )
        return loss, metrics


Formula: TypeAlias = Callable[[LossInputs], Loss]
