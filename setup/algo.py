"""The algorithms by themselves, on tensors (batch, seq_len); the maths is training/core_algos'.

Losses come as (loss, metrics), a metric being a plain number.
"""

from typing import Any

from torch import Tensor

from training import core_algos
from training.batch.torch_functional import masked_mean
from training.core_algos import compute_gae_advantage_return, compute_kl_penalty, compute_ppo_loss, estimate_advantages
from training.core_algos import compute_grpo_outcome_advantage as compute_grpo_advantage

Loss = tuple[Tensor, dict[str, float]]


def compute_policy_loss(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio: float = 0.2,
    **settings: Any,
) -> Loss:
    """Computes PPO's clipped loss, a mean over sampled tokens; `settings` are further ones of PolicyLossConfig."""
    config = core_algos.PolicyLossConfig(clip_ratio=clip_ratio, **settings)
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old_log_probs, log_probs, advantages, response_mask, config.loss_agg_mode, config
    )
    return loss, {name.removeprefix("actor/"): float(value) for name, value in metrics.items()}


def compute_value_loss(
    vpreds: Tensor, returns: Tensor, old_values: Tensor, response_mask: Tensor, cliprange_value: float = 0.5
) -> Loss:
    """Computes the clipped regression of values on returns."""
    loss, clipped = core_algos.compute_value_loss(vpreds, returns, old_values, response_mask, cliprange_value)
    return loss, {"vf_clipfrac": float(clipped)}


def apply_kl_penalty(
    token_level_rewards: Tensor, log_probs: Tensor, ref_log_probs: Tensor, response_mask: Tensor, kl_coef: float
) -> tuple[Tensor, float]:
    """Subtracts `kl_coef` times the KL (k1) from each token's reward; returns that and the mean KL, nats per token."""
    kl = compute_kl_penalty(log_probs, ref_log_probs) * response_mask
    return token_level_rewards - kl_coef * kl, float(masked_mean(kl, response_mask))


class KLController(core_algos.AdaptiveKLController):
    """Keeps the coefficient of the KL, `value`; with `adaptive` it is steered towards `target_kl` nats."""

    def __init__(
        self, init_kl_coef: float = 0.001, target_kl: float = 0.1, adaptive: bool = False, horizon: int = 10_000
    ) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)
        self.adaptive = adaptive

    def update(self, current_kl: float, n_steps: int) -> None:
        """Steers after `n_steps` samples whose mean KL was `current_kl`."""
        if self.adaptive:
            super().update(current_kl, n_steps)
