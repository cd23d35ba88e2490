"""Names that verl's users and older guides know, and that no run of ours calls.

Invariant: each is a thin function, or a second name, over what the other files of this package
compute.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from training.core_algos.aggregation import LossAggMode
from training.core_algos.group_advantages import (
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
)
from training.core_algos.kl import kl_penalty as estimate_kl
from training.core_algos.loss_settings import PolicyLossConfig
from training.core_algos.masked_ops import at_least_float32
from training.core_algos.policy_losses import compute_policy_loss_vanilla
from training.core_algos.token_advantages import gae_scan

compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage

# What the vanilla loss and its aggregation read of a config.
VANILLA_SETTINGS = (
    "clip_ratio",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "loss_agg_mode",
    "global_batch_info",
)


@torch.no_grad()
def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Runs GAE with episode ends instead of a mask, for trajectories of steps.

    Nothing is bootstrapped past the last step (arXiv:1506.02438, eq. 16).

    Args:
        rewards, values, dones: (..., steps); dones is 1 on the step that ends its episode.
        gamma, lam: discount and GAE's lambda, per step.
    Returns: advantages (not whitened), returns: (..., steps).
    """
    rewards, values = at_least_float32(rewards, values)
    no_mask = torch.ones_like(values, dtype=torch.bool)
    return gae_scan(rewards, values, no_mask, continues=dones == 0, gamma=gamma, lam=lam)


advantage_estimation = estimate_advantages


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: LossAggMode = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the vanilla loss in its older form.

    Returns: loss, clip fraction, KL, lower clip fraction, each 0-dim.
    """
    config = PolicyLossConfig(
        clip_ratio=cliprange,
        clip_ratio_low=cliprange_low,
        clip_ratio_high=cliprange_high,
        clip_ratio_c=clip_ratio_c,
    )
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
    )
    return (
        loss,
        metrics["actor/pg_clipfrac"],
        metrics["actor/ppo_kl"],
        metrics["actor/pg_clipfrac_lower"],
    )


def compute_ppo_loss(
    old_log_probs: Tensor,
    new_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: Any = None,
) -> Tensor:
    """Computes the vanilla loss alone, aggregated as `config.loss_agg_mode` says.

    Args:
        config: a PolicyLossConfig, the actor's section, or an object or mapping with any of its
            settings, as an OmegaConf; what it lacks, or has as None, is the default's. What the
            loss does not read may be anything.
    """
    settings = {}
    for name in VANILLA_SETTINGS:
        value = _read_setting(config, name)
        if value is not None:
            settings[name] = value
    loss_config = PolicyLossConfig(**settings)
    loss, _ = compute_policy_loss_vanilla(
        old_log_probs,
        new_log_probs,
        advantages,
        response_mask,
        loss_agg_mode=loss_config.aggregation,
        config=loss_config,
    )
    return loss


def _read_setting(config: Any, name: str) -> Any:
    """Reads a setting of a user's config, by key or by attribute; None without it."""
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimates the KL per token by the plain log-ratio (k1), in the inputs' shape."""
    return estimate_kl(log_probs, ref_log_probs, "kl")


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates the KL per token as `kl_penalty`, with its own gradient also of a kind with a +."""
    return estimate_kl(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def compute_rewards(
    token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float
) -> Tensor:
    """Subtracts `kl_ratio` times the per-token KL (k1) from the scores: (batch, response_len)."""
    return token_level_scores - kl_ratio * compute_kl_penalty(old_log_prob, ref_log_prob)
