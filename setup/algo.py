"""The algorithms by themselves, on tensors (batch, seq_len).

Losses come as (loss, metrics), a metric being a plain number. Invariant: the maths is
training/core_algos'; nothing is computed here a second time.
"""

from typing import Any

from torch import Tensor

from setup.ppo_batch import PPOBatch
from training import core_algos
from training.core_algos import (
    compute_gae_advantage_return,
    compute_kl_penalty,
    compute_ppo_loss,
    estimate_advantages,
)
from training.core_algos import compute_grpo_outcome_advantage as compute_grpo_advantage
from training.core_algos.masked_ops import masked_mean
from workers.model.policy_model import PolicyValueModel

__all__ = [
    "KLController",
    "PPOBatch",
    "PolicyValueModel",
    "apply_kl_penalty",
    "compute_gae_advantage_return",
    "compute_grpo_advantage",
    "compute_kl_penalty",
    "compute_policy_loss",
    "compute_ppo_loss",
    "compute_value_loss",
    "estimate_advantages",
]

LossAndMetrics = tuple[Tensor, dict[str, float]]


def compute_policy_loss(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio: float = 0.2,
    **settings: Any,
) -> LossAndMetrics:
    """Computes PPO's clipped loss, a mean over sampled tokens.

    Args:
        old_log_probs, log_probs: (batch, seq_len), in nats.
        advantages, response_mask: (batch, seq_len).
        settings: further settings of PolicyLossConfig.
    """
    config = core_algos.PolicyLossConfig(clip_ratio=clip_ratio, **settings)
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old_log_prob=old_log_probs,
        log_prob=log_probs,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=config.aggregation,
        config=config,
    )
    return loss, {name.removeprefix("actor/"): float(value) for name, value in metrics.items()}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    old_values: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
) -> LossAndMetrics:
    """Computes the clipped regression of values on returns; all tensors (batch, seq_len)."""
    loss, clipped_fraction = core_algos.compute_value_loss(
        vpreds=vpreds,
        returns=returns,
        values=old_values,
        response_mask=response_mask,
        cliprange_value=cliprange_value,
    )
    return loss, {"vf_clipfrac": float(clipped_fraction)}


def apply_kl_penalty(
    token_level_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
) -> tuple[Tensor, float]:
    """Subtracts `kl_coef` times the KL (k1) from each token's reward.

    Returns:
        rewards: (batch, seq_len), and the mean KL in nats per token.
    """
    kl = compute_kl_penalty(log_probs, ref_log_probs)
    kl = kl.where(response_mask.bool(), 0)
    return token_level_rewards - kl_coef * kl, float(masked_mean(kl, response_mask))


class KLController(core_algos.AdaptiveKLController):
    """Keeps the coefficient of the KL, `value`.

    With `adaptive` it is steered towards `target_kl` nats.
    """

    def __init__(
        self,
        init_kl_coef: float = 0.001,
        target_kl: float = 0.1,
        adaptive: bool = False,
        horizon: int = 10_000,
    ) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)
        self.adaptive = adaptive

    def update(self, current_kl: float, n_steps: int) -> None:
        """Steers after `n_steps` samples whose mean KL was `current_kl`."""
        if self.adaptive:
            super().update(current_kl, n_steps)
