"""Optimal token baselines: of a group's returns, one mean for each place, that weighs episodes by what they varied.

Invariant: as of all estimators; the baseline of a place is the same for all of a group that reach it.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.core_algos.advantages import discounted_returns
from training.core_algos.group_advantages import Advantages, numbered
from training.core_algos.registry import register_adv_est


@register_adv_est("optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    config: Any = None,
) -> Advantages:
    """Subtracts the baseline of least variance, B_t = sum_i G_{i,t} W_{i,t} / sum_i W_{i,t}  (arXiv:2602.07078).

    W_{i,t} sums 1 - 2 pi + sum pi^2, the squared norm of the logits' score, over the sampled tokens up to t; G is the
    return.

    Args:
        token_level_rewards, response_mask: (batch, response_len); t counts its columns.
        index: (batch,) the group (uid) of each row.
        old_log_probs, sum_pi_squared: (batch, response_len), of the policy before the update; nats, and the sum of its
            squared probabilities.
        rollout_is_weights: (batch, response_len) importance weights, whose squares scale the summands of W.
        handle_zero_tail: no baseline where a single row of the group is left.
    Returns: advantages, returns: (batch, response_len) float32, zero where the mask is zero.
    """
    sampled = response_mask.bool()
    returns = discounted_returns(token_level_rewards, response_mask)
    weights = 1 - 2 * old_log_probs.float().exp() + sum_pi_squared.float()
    if rollout_is_weights is not None:
        weights = weights * rollout_is_weights**2
    weights = torch.where(sampled, weights, 0).cumsum(-1).masked_fill_(~sampled, 0)
    ids = numbered(index, sampled.device)

    def of_group(per_token: Tensor) -> Tensor:
        return torch.zeros_like(per_token).index_add_(0, ids, per_token)

    baselines = of_group(returns * weights).div_(of_group(weights).add_(epsilon))
    left = of_group(sampled.int())
    # Of one row alone there is none in any case.
    rows = torch.bincount(ids, sampled.any(-1).float(), len(sampled))[:, None]
    baselines.masked_fill_((left <= 1) if handle_zero_tail else (rows <= 1), 0)
    return torch.where(sampled, returns - baselines[ids], 0), returns


@register_adv_est("tir_optimal_token_baseline")
@torch.no_grad()
def compute_multi_turn_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = 1e-8,
    config: Any = None,
) -> Advantages:
    """Is the optimal token baseline of episodes with turns, where t counts a row's sampled tokens alone.

    Args and returns as in `compute_optimal_token_baseline_advantage`.
    """
    # Sampled tokens first, in order; and back.
    order = response_mask.bool().logical_not().int().argsort(dim=-1, stable=True)
    given = {"token_level_rewards": token_level_rewards, "old_log_probs": old_log_probs, "response_mask": response_mask}
    given |= {"sum_pi_squared": sum_pi_squared}
    given |= {} if rollout_is_weights is None else {"rollout_is_weights": rollout_is_weights}
    packed = {name: tensor.gather(-1, order) for name, tensor in given.items()}
    results = compute_optimal_token_baseline_advantage(
        index=index, handle_zero_tail=handle_zero_tail, epsilon=epsilon, **packed
    )
    advantages, returns = (torch.zeros_like(x).scatter(-1, order, x) for x in results)
    return advantages, returns
