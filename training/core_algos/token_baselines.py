"""Optimal token baselines: of a group's returns, one mean for each place, that weighs episodes by what they varied.

Invariant: as of all estimators; the baseline of a place is the same for all of a group that reach it.
"""

from functools import wraps
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.containers import row_blocks
from training.core_algos.advantages import discounted_returns
from training.core_algos.group_advantages import Advantages, numbered
from training.core_algos.registry import built_in_adv_est


@built_in_adv_est("optimal_token_baseline", "groups")
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
    Returns: advantages, returns: (batch, response_len), zero where the mask is zero.
    """
    sampled, ids = response_mask.bool(), numbered(index, response_mask.device)
    returns, blocks = discounted_returns(token_level_rewards, response_mask), row_blocks(sampled)
    products, totals, left = torch.zeros(3, len(ids.unique()), returns.shape[1], dtype=returns.dtype, device=ids.device)
    for rows in blocks:
        norms = 1 - 2 * old_log_probs[rows].to(returns.dtype).exp() + sum_pi_squared[rows]
        if rollout_is_weights is not None:
            norms = norms * rollout_is_weights[rows].to(returns.dtype) ** 2
        weights = torch.where(sampled[rows], norms, 0).cumsum(-1).masked_fill_(~sampled[rows], 0)
        summed = returns[rows] * weights, weights, sampled[rows].to(returns.dtype)
        for total, of_rows in zip((products, totals, left), summed, strict=True):
            total.index_add_(0, ids[rows], of_rows)
    # Of one row alone there is none in any case.
    alone = torch.bincount(ids, sampled.any(-1).float())[:, None] <= 1
    baselines = (products / (totals + epsilon)).masked_fill_((left <= 1) if handle_zero_tail else alone, 0)
    advantages = torch.empty_like(returns)
    for rows in blocks:
        advantages[rows] = torch.where(sampled[rows], returns[rows] - baselines[ids[rows]], 0)
    return advantages, returns


@built_in_adv_est("tir_optimal_token_baseline", "groups")
@wraps(compute_optimal_token_baseline_advantage, assigned=())
def compute_multi_turn_optimal_token_baseline_advantage(*args: Any, **kwargs: Any) -> Advantages:
    """Is the optimal token baseline of episodes with turns, where t counts a row's sampled tokens alone.

    Args and returns as in `compute_optimal_token_baseline_advantage`.
    """
    given = signature(compute_optimal_token_baseline_advantage).bind(*args, **kwargs).arguments
    sampled = given["response_mask"].bool()
    if not bool((sampled[:, 1:] & ~sampled[:, :-1]).any()):
        return compute_optimal_token_baseline_advantage(**given)
    # Sampled tokens first, in order; and back.
    order = sampled.logical_not().int().argsort(dim=-1, stable=True)
    packed = {name: x.gather(-1, order) if isinstance(x, Tensor) else x for name, x in given.items()}
    results = compute_optimal_token_baseline_advantage(**packed)
    advantages, returns = (torch.zeros_like(x).scatter(-1, order, x) for x in results)
    return advantages, returns
