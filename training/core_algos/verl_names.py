"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and how token losses become one number.

Invariants: every function is pure; every denominator is an explicit argument, so that a loss does not depend on how a
mini-batch was split into micro-batches or over ranks; values, log-probs and advantages outside the mask change nothing.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns step across holes (E0)
"""

from typing import Unpack

import torch
from torch import Tensor

from training.batch import torch_functional as F
from training.core_algos.advantages import _gae_scan
from training.core_algos.kl_and_values import GlobalBatchInfo, LossAggMode, agg_loss, kl_penalty
from training.core_algos.policy_losses import PolicyLossConfig, compute_policy_loss_vanilla


@torch.no_grad()
def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE with episode ends instead of a mask, for trajectories of steps; nothing is bootstrapped past the last step.

    Args: rewards, values, dones: (..., steps); dones is 1 on the step that ends its episode.
    Returns: advantages (not whitened), returns: (..., steps) float32.
    """
    values = values.float()
    everywhere = torch.ones_like(values, dtype=torch.bool)
    return _gae_scan(rewards.float(), values, everywhere, 1.0 - dones.float(), gamma, lam)


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
    """The older form of the vanilla loss: returns (loss, clip fraction, KL, lower clip fraction), each 0-dim."""
    config = PolicyLossConfig(
        clip_ratio=cliprange, clip_ratio_low=cliprange_low, clip_ratio_high=cliprange_high, clip_ratio_c=clip_ratio_c
    )
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return loss, metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]


def compute_ppo_loss(
    old_log_probs: Tensor,
    new_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig | None = None,
) -> Tensor:
    """The vanilla loss alone, aggregated as `config.loss_agg_mode` says."""
    config = PolicyLossConfig() if config is None else config
    return compute_policy_loss_vanilla(
        old_log_probs, new_log_probs, advantages, response_mask, config.loss_agg_mode, config
    )[0]


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> Tensor:
    """The policy's entropy in nats, from logits (batch, response_len, vocabulary), aggregated as `agg_loss` does."""
    return agg_loss(F.entropy_from_logits(logits), response_mask, loss_agg_mode, **counts)


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token KL, the plain log-ratio (k1), of the inputs' shape."""
    return kl_penalty(log_probs, ref_log_probs, "kl")


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores less `kl_ratio` times the per-token KL (k1): (batch, response_len)."""
    return token_level_scores - kl_ratio * compute_kl_penalty(old_log_prob, ref_log_prob)
