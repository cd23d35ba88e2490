"""Policy losses: PPO's clipped surrogate, and the config that it and registered losses are handed.

Invariant: a loss is pure and returns (loss, metrics) of the micro-batch it is given, as shares of the mini-batch; the
log-probs of masked tokens reach neither the loss nor its gradient.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from training.config.settings import LossAggMode
from training.core_algos.aggregation import GlobalBatchInfo, agg_loss, token_fraction
from training.core_algos.kl_and_values import MAX_LOG_RATIO
from training.core_algos.registry import register_policy_loss


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Mapping[str, Any]):
    """Holds what a policy loss may read as `config`: by attribute, or by key as losses written for verl do.

    `clip_ratio_low` and `clip_ratio_high` of None are `clip_ratio`; `policy_loss` is the loss's own frozen sub-config.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: LossAggMode = "token-mean"
    policy_loss: Any = None
    global_batch_info: GlobalBatchInfo = field(default_factory=GlobalBatchInfo)

    def __getitem__(self, key: str) -> Any:
        return {f.name: getattr(self, f.name) for f in fields(self)}[key]

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes PPO's clipped loss (arXiv:1707.06347, eq. 7), at most c * |A| where A < 0 (arXiv:1912.09729, eq. 5).

    Args:
        old_log_prob, log_prob, advantages, response_mask: (batch, response_len); log-probs in nats.
        loss_agg_mode: see `agg_loss`.
        config: `PolicyLossConfig` or anything with its clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c and
            global_batch_info; None means its defaults.
        rollout_is_weights: (batch, response_len) importance weights that multiply each token's loss.
    Returns:
        loss and detached metrics, 0-dim: actor/pg_clipfrac, actor/ppo_kl (mean of old - new), actor/pg_clipfrac_lower.
    """
    config = PolicyLossConfig() if config is None else config
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    if config.clip_ratio_c <= 1:
        raise ValueError(f"clip_ratio_c={config.clip_ratio_c} must be above 1: it bounds the ratio where A < 0")
    counts = config.global_batch_info

    # Masked before the exponential, so that padding's log-probs reach neither the loss nor its gradient.
    log_ratio = torch.where(response_mask.bool(), log_prob - old_log_prob, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    negative = advantages < 0
    token_loss = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)  # (batch, response_len)
    if rollout_is_weights is not None:
        token_loss = token_loss * rollout_is_weights
    metrics = {
        "actor/pg_clipfrac": token_fraction(clipped > unclipped, response_mask, counts),
        "actor/ppo_kl": token_fraction(-log_ratio, response_mask, counts),
        "actor/pg_clipfrac_lower": token_fraction((pessimistic > bound) & negative, response_mask, counts),
    }
    return agg_loss(token_loss, response_mask, loss_agg_mode, **counts), metrics
