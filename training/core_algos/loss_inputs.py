"""What a policy loss is computed from, and the decorator that makes a registered loss of a formula.

A formula takes `LossInputs` and returns (loss, metrics). `policy_loss` makes of it a function with
verl's arguments, which an update calls on each micro-batch:

    (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
        -> (loss, metrics)

    old_log_prob, log_prob, advantages, response_mask: (batch, response_len); log-probs in nats.
    loss_agg_mode: see `agg_loss`.
    config: `PolicyLossConfig` or anything with its fields; None means its defaults.
    rollout_is_weights: (batch, response_len) importance weights that multiply each token's loss, or
        None.
    loss: 0-dim, this micro-batch's share of the mini-batch's; 0 with a gradient path where nothing
        is masked in.
    metrics: detached, 0-dim: actor/ppo_kl (mean of old - new), actor/pg_clipfrac (the share of
        tokens whose gradient is cut), actor/pg_clipfrac_lower (of those that reach the bound where
        advantages are negative).

Invariant: the log-probs of masked tokens reach neither the loss nor its gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from training.config import ActorConfig, RolloutCorrectionConfig
from training.core_algos.aggregation import GlobalBatchInfo, LossAggMode, agg_loss, token_fraction
from training.core_algos.kl import MAX_LOG_RATIO
from training.core_algos.registry import PolicyLossFn, register_policy_loss

Loss = tuple[Tensor, dict[str, Any]]


class PolicyLossConfig(ActorConfig):
    """Holds what a policy loss may read as `config`: by attribute, or by key as verl's losses do.

    That is the actor's section, whose `policy_loss` is the loss's own frozen sub-config, and two
    things beside it.
    """

    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    # Any, as the tensors in it are not for a config to check.
    global_batch_info: Any = field(default_factory=GlobalBatchInfo)


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
    """

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    loss_agg_mode: LossAggMode
    config: Any
    importance_weights: Tensor | None

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
        """Averages over the mini-batch's tokens, detached; see `token_fraction`."""
        return token_fraction(per_token, self.mask, self.config.global_batch_info)

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
        counts: GlobalBatchInfo = self.config.global_batch_info
        loss = agg_loss(token_losses, self.mask, self.loss_agg_mode, **counts)
        return loss, metrics


def policy_loss(
    name: str, loss_agg_mode: LossAggMode = "token-mean"
) -> Callable[[Callable[[LossInputs], Loss]], PolicyLossFn]:
    """Returns a decorator that makes a registered loss, with verl's arguments, of a formula.

    Args:
        name: what the loss is registered as.
        loss_agg_mode: its default for the argument of that name.
    """
    default_mode = loss_agg_mode

    def decorate(formula: Callable[[LossInputs], Loss]) -> PolicyLossFn:
        def loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: LossAggMode = default_mode,
            config: Any = None,
            rollout_is_weights: Tensor | None = None,
        ) -> Loss:
            inputs = LossInputs(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=advantages,
                mask=response_mask.bool(),
                loss_agg_mode=loss_agg_mode,
                config=PolicyLossConfig() if config is None else config,
                importance_weights=rollout_is_weights,
            )
            return formula(inputs)

        # Not functools.wraps: callers read the signature, which is verl's and not the formula's.
        loss.__module__ = formula.__module__
        loss.__name__ = formula.__name__
        loss.__qualname__ = formula.__qualname__
        loss.__doc__ = formula.__doc__
        return register_policy_loss(name)(loss)

    return decorate
