"""What verl's users know of the algorithms and no run here calls: older forms of losses, and estimators by other names.

`training.core_algos` offers all of it under verl's names. Invariant: every function is pure, and a few lines over what
the other files of this package do.
"""

from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor

from training.batch.torch_functional import at_least_float32
from training.batch.verl_names import entropy_from_logits
from training.config.algorithm_settings import LossAggMode
from training.core_algos.advantages import gae_scan
from training.core_algos.aggregation import GlobalBatchInfo, agg_loss
from training.core_algos.group_advantages import compute_grpo_outcome_advantage, compute_rloo_outcome_advantage
from training.core_algos.kl_and_values import kl_penalty
from training.core_algos.policy_losses import PolicyLossConfig, compute_policy_loss_vanilla

compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


@torch.no_grad()
def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Runs GAE with episode ends instead of a mask, for trajectories of steps; nothing is bootstrapped past the last.

    Args: rewards, values, dones: (..., steps); dones is 1 on the step that ends its episode.
    Returns: advantages (not whitened), returns: (..., steps).
    """
    rewards, values = at_least_float32(rewards, values)
    return gae_scan(rewards, values, torch.ones_like(values, dtype=torch.bool), dones == 0, gamma, lam)


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
    """Computes the vanilla loss in its older form: (loss, clip fraction, KL, lower clip fraction), each 0-dim."""
    config = PolicyLossConfig(
        clip_ratio=cliprange, clip_ratio_low=cliprange_low, clip_ratio_high=cliprange_high, clip_ratio_c=clip_ratio_c
    )
    loss, means = compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
    return loss, means["actor/pg_clipfrac"], means["actor/ppo_kl"], means["actor/pg_clipfrac_lower"]


def compute_ppo_loss(
    old_log_probs: Tensor, new_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, config: Any = None
) -> Tensor:
    """Computes the vanilla loss alone, aggregated as `config.loss_agg_mode` says.

    `config`: a PolicyLossConfig, the actor's section, or a mapping with any of its settings.
    """
    read_from = config.get if hasattr(config, "get") else partial(getattr, config)
    own = {name: value for name in vars(PolicyLossConfig()) if (value := read_from(name, None)) is not None}
    read, inputs = PolicyLossConfig(**own), (old_log_probs, new_log_probs, advantages, response_mask)
    return compute_policy_loss_vanilla(*inputs, read.loss_agg_mode, read)[0]


def compute_entropy_loss(
    logits: Tensor, response_mask: Tensor, loss_agg_mode: LossAggMode = "token-mean", **counts: Unpack[GlobalBatchInfo]
) -> Tensor:
    """Aggregates the policy's entropy in nats as `agg_loss` does, from logits (batch, response_len, vocabulary)."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **counts)


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimates the KL per token by the plain log-ratio (k1), in the inputs' shape."""
    return kl_penalty(log_probs, ref_log_probs, "kl")


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Subtracts `kl_ratio` times the per-token KL (k1) from the scores: (batch, response_len)."""
    return token_level_scores - kl_ratio * compute_kl_penalty(old_log_prob, ref_log_prob)
