"""The optimal token baseline: of a group's returns one mean for each place, of least variance.

The mean weighs each episode by how much its tokens up to there could have varied
(arXiv:2602.07078).

Invariant: both estimators are pure, and rewards and log-probs of masked tokens change nothing; the
results are zero there. Numbers are float32, or float64 where the rewards are.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.core_algos.groups import consecutive_ids
from training.core_algos.registry import Advantages, register_adv_est
from training.core_algos.token_advantages import discounted_returns


@register_adv_est(
    "optimal_token_baseline",
    span="groups",
    formula="return - baseline of least variance at the token's place",
    ordered=False,
)
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
    """Subtracts from each token's return the baseline of least variance at its place in the group.

    A_{i,t} = G_{i,t} - B_t with B_t = sum_i G_{i,t} W_{i,t} / sum_i W_{i,t}. G is the return;
    W_{i,t} sums 1 - 2 pi + sum pi^2, the squared norm of the logits' score, over the sampled tokens
    up to t (arXiv:2602.07078).

    t counts columns, those of observations too, as verl's does: with a row of `a o o b`, b stands
    at place 3. A group one of whose episodes has several rows is handed in as lines of sampled
    tokens, since what was observed between two rows is in no column: b stands at place 1 there, as
    in `tir_optimal_token_baseline`, which counts all groups so.

    Args:
        token_level_rewards, response_mask: (batch, response_len); t counts its columns.
        index: (batch,) the group (uid) of each row.
        old_log_probs: (batch, response_len), of the policy before the update, nats.
        sum_pi_squared: (batch, response_len), the sum of that policy's squared probabilities.
        rollout_is_weights: (batch, response_len) importance weights, whose squares scale the
            summands of W.
        handle_zero_tail: whether to leave the baseline out where a single row of the group is left.
        epsilon: what is added to the sum of W.
        config: not read.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero. A group of one row
        keeps its returns.
    """
    sampled = response_mask.bool()
    ids = consecutive_ids(index, response_mask.device)
    returns = discounted_returns(token_level_rewards, response_mask)
    squared_norms = 1 - 2 * old_log_probs.to(returns.dtype).exp() + sum_pi_squared
    if rollout_is_weights is not None:
        squared_norms = squared_norms * rollout_is_weights.to(returns.dtype) ** 2
    weights = torch.where(sampled, squared_norms, 0).cumsum(-1).masked_fill_(~sampled, 0)

    # Sums over the rows of each group, at each place: (groups, response_len).
    zeros = returns.new_zeros(len(ids.unique()), returns.shape[1])
    weighted_returns = zeros.index_add(0, ids, (returns * weights).to(zeros.dtype))
    total_weights = zeros.index_add(0, ids, weights.to(zeros.dtype))
    baselines = weighted_returns / (total_weights + epsilon)
    if handle_zero_tail:
        rows_left = zeros.index_add(0, ids, sampled.to(zeros.dtype))
        without_baseline = rows_left <= 1
    else:
        rows_of_group = torch.bincount(ids, sampled.any(-1).float())[:, None]
        without_baseline = rows_of_group <= 1
    baselines = baselines.masked_fill_(without_baseline, 0)

    advantages = torch.where(sampled, returns - baselines[ids], 0)
    return advantages, returns


@register_adv_est(
    "tir_optimal_token_baseline",
    span="groups",
    formula="return - baseline of least variance at the token's place",
    ordered=False,
)
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
    """Computes the optimal token baseline where t counts a row's sampled tokens alone.

    For episodes with turns (arXiv:2602.07078), in however many rows they are; args and returns as
    in `compute_optimal_token_baseline_advantage`.
    """
    sampled = response_mask.bool()
    has_holes = bool((sampled[:, 1:] & ~sampled[:, :-1]).any())
    if not has_holes:
        return compute_optimal_token_baseline_advantage(
            token_level_rewards,
            response_mask,
            index,
            old_log_probs=old_log_probs,
            sum_pi_squared=sum_pi_squared,
            rollout_is_weights=rollout_is_weights,
            handle_zero_tail=handle_zero_tail,
            epsilon=epsilon,
            config=config,
        )
    # Sampled tokens first, in order.
    order = sampled.logical_not().int().argsort(dim=-1, stable=True)
    if rollout_is_weights is not None:
        rollout_is_weights = rollout_is_weights.gather(-1, order)
    packed_advantages, packed_returns = compute_optimal_token_baseline_advantage(
        token_level_rewards.gather(-1, order),
        response_mask.gather(-1, order),
        index,
        old_log_probs=old_log_probs.gather(-1, order),
        sum_pi_squared=sum_pi_squared.gather(-1, order),
        rollout_is_weights=rollout_is_weights,
        handle_zero_tail=handle_zero_tail,
        epsilon=epsilon,
        config=config,
    )
    # And back to their places.
    zeros = torch.zeros_like(packed_returns)
    advantages = zeros.scatter(-1, order, packed_advantages)
    returns = zeros.scatter(-1, order, packed_returns)
    return advantages, returns
