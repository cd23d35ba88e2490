"""Advantage estimators that go along the tokens, or along the turns, and those that take each token by itself.

Invariant: every estimator is pure, and rewards and values of masked tokens change nothing; the results are zero there.

Numbers are float32, or float64 where the rewards are.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns pass over E0

An optimal token baseline is, of a group's returns, one mean for each place, that weighs episodes by what they varied.
Those that see turns credit the reward of a turn to it, and to those before it:

    turn_ids            =  0  0 -1 -1  1  1  1 -1      of each sampled token
    token_level_rewards =  0 .2  0  0  0  0  1  0      turn 0 gets .2, turn 1 gets 1
    return of turn 0    = .2 + turn_gamma * 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from inspect import signature
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data.containers import row_blocks
from training.batch.torch_functional import at_least_float32, masked_whiten
from training.core_algos import group_advantages
from training.core_algos.group_advantages import (
    Advantages,
    Groups,
    built_in_adv_est,
    call_adv_estimator,
    numbered,
)

# Entries that a scan turns time first at once.
SCAN_ENTRIES = 1 << 23


def gae_scan(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    continues: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Runs generalised advantage estimation (arXiv:1506.02438, eq. 16) backwards over the last dimension.

    Args:
        rewards, values, mask: (..., steps) of one shape; the mask is bool.
        continues: (..., steps) bool, false where the episode ends with this very step; None: nowhere.
        gamma, lam: discount and GAE's lambda, per step that is not masked.
    Returns:
        advantages, returns = advantages + values: (..., steps), zero where the mask is.
    """
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    goes_on = torch.ones_like(mask) if continues is None else continues
    tensors = (rewards, values, mask, goes_on, advantages, returns)
    given = [x.reshape(-1, values.shape[-1]) for x in tensors] if values.numel() else []
    for rows in row_blocks(given[1], SCAN_ENTRIES) if given else ():
        # Time first, so that a step of all rows is one piece of memory.
        paid, own, inside, on = (x[rows].T.contiguous() for x in given[:4])
        scanned = torch.zeros_like(own)
        steps, decays = (
            scanned.unbind(),
            torch.where(inside, on * values.new_tensor(gamma * lam), 1).unbind(),
        )
        # First the value of the next sampled step, then the error that it leaves, then the sum of errors.
        for t in range(len(steps) - 1, 0, -1):
            torch.where(inside[t], own[t], steps[t], out=steps[t - 1])
        scanned.mul_(on).mul_(gamma).add_(paid).sub_(own).masked_fill_(~inside, 0)
        for t in range(len(steps) - 2, -1, -1):
            steps[t].add_(decays[t] * steps[t + 1])
        given[4][rows] = scanned.masked_fill_(~inside, 0).T
        given[5][rows] = scanned.add_(own).masked_fill_(~inside, 0).T
    return advantages, returns


@built_in_adv_est("gae", "episodes")
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Estimates advantages by GAE (arXiv:1506.02438, eq. 16) and whitens them over all tokens of the batch.

    Args:
        token_level_rewards: (batch, response_len).
        values: (batch, response_len), the critic's value before each token.
        response_mask: (batch, response_len), 1 on sampled tokens; masked tokens take no time: no discount, no reward.
        gamma, lam: discount and GAE's lambda, per sampled token.
        whiten: whether to; returns = advantages + values are those of advantages that are not whitened in any case.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero.
    """
    rewards, values = at_least_float32(token_level_rewards, values)
    mask = response_mask.bool()
    advantages, returns = gae_scan(rewards, values, mask, None, gamma, lam)
    return masked_whiten(advantages, mask) if whiten else advantages, returns


@torch.no_grad()
def discounted_returns(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> Tensor:
    """Sums the discounted rewards from each token on, masked tokens taking no time: (batch, response_len)."""
    (rewards,) = at_least_float32(token_level_rewards)
    mask = response_mask.bool()
    if gamma != 1.0:
        return gae_scan(rewards, rewards.new_zeros(()).expand_as(rewards), mask, None, gamma, 1.0)[
            0
        ]
    return torch.where(mask, rewards, 0).flip(-1).cumsum(-1).flip(-1).masked_fill_(~mask, 0)


@built_in_adv_est("reinforce_plus_plus", "episodes")
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """Takes each token's discounted return, whitened over the batch: REINFORCE++ (arXiv:2501.03262).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        config: gives the discount `gamma` per sampled token; None means 1.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero.
    """
    returns = discounted_returns(
        token_level_rewards, response_mask, 1.0 if config is None else config.gamma
    )
    return masked_whiten(returns, response_mask) if whiten else returns, returns


@built_in_adv_est("remax", "episodes")
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None
) -> tuple[Tensor, Tensor]:
    """Subtracts the reward of a greedy answer to the same prompt from the return: ReMax (arXiv:2310.10505, eq. 7).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        reward_baselines: (batch,) rewards of the greedy answers.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero.
    """
    mask = response_mask.bool()
    returns = discounted_returns(token_level_rewards, mask)
    return torch.where(mask, returns - reward_baselines.to(returns.dtype)[:, None], 0), returns


@built_in_adv_est("on_policy_distillation")
def compute_on_policy_distillation_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    index: np.ndarray | None = None,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Rewards each token with how much likelier the teacher finds it, and with nothing of what follows.

    A_t = c (log p_teacher(t) - log p(t)), the negative of the reverse KL's estimate at this token alone, as of a policy
    gradient with a discount of 0 (on-policy distillation, arXiv:2306.13649). Added to it are the task's advantages
    where the config names their estimator.

    Args:
        token_level_rewards, response_mask, old_log_probs, ref_log_prob: (batch, response_len), nats.
        index: (batch,) the group (uid) of each row, for the task's estimator.
        config: has distillation_coef, c, and distillation_task, an estimator that compares a group's scores, or None.
    Returns: advantages, returns (the same): (batch, response_len), zero where the mask is zero.
    """
    coef, task = (
        (1.0, None) if config is None else (config.distillation_coef, config.distillation_task)
    )
    (apart,) = at_least_float32(ref_log_prob - old_log_probs)
    advantages = coef * torch.where(response_mask.bool(), apart, 0)
    if task is not None:
        given = {
            "token_level_rewards": token_level_rewards,
            "response_mask": response_mask,
            "index": index,
        }
        advantages = advantages + call_adv_estimator(task, **given, config=config)[0]
    return advantages, advantages


@dataclass(frozen=True)
class Turns:
    """Holds an episode's turns beside its tokens.

    Attributes:
        of_token: (batch, response_len) int64, the turn of each sampled token; of others it is one behind the last.
        sampled: (batch, response_len) bool.
        rewards: (batch, turns), the sum over each turn's sampled tokens.
    """

    of_token: Tensor
    sampled: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, token_level_rewards: Tensor, response_mask: Tensor, turn_ids: Tensor) -> "Turns":
        """Finds the turns of a batch, whose numbers never fall along a row."""
        sampled, (rewards,) = response_mask.bool(), at_least_float32(token_level_rewards)
        count = int(torch.where(sampled, turn_ids, 0).max()) + 1 if sampled.numel() else 1
        of_token = torch.where(sampled, turn_ids, count).long()
        sums = rewards.new_zeros(len(sampled), count + 1).scatter_add_(1, of_token, rewards)
        return cls(of_token, sampled, sums[:, :-1])

    @cached_property
    def last(self) -> Tensor:
        """Is the place of each turn's last sampled token; -1 where it has none: (batch, turns) int64."""
        return self.places("amax", -1)

    @property
    def exists(self) -> Tensor:
        """Says which turns have a sampled token: (batch, turns) bool."""
        return self.last >= 0

    def spread(self, per_turn: Tensor) -> Tensor:
        """Gives every sampled token its turn's number: (batch, turns) -> (batch, response_len)."""
        return pad(per_turn.to(self.rewards.dtype), (0, 1)).gather(1, self.of_token)

    def places(self, which: str, none: int) -> Tensor:
        """Finds each turn's first (amin) or last (amax) sampled token: (batch, turns) int64, `none` without one."""
        columns = torch.arange(self.sampled.shape[1], device=self.sampled.device).expand_as(
            self.of_token
        )
        found = columns.new_full((len(self.sampled), self.rewards.shape[1] + 1), none)
        return found.scatter_reduce_(1, self.of_token, columns, which)[:, :-1]


@built_in_adv_est("turn_gae", "episodes")
def compute_turn_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    config: Any = None,
    whiten: bool = True,
) -> Advantages:
    """Runs GAE over turns, and inside each turn over its tokens towards the turn's return (arXiv:2504.20073).

    With V_k the value before turn k's first token, A_k is GAE over turns and A_k + V_k what its tokens are to reach.

    Args:
        token_level_rewards, values, response_mask, turn_ids: (batch, response_len).
        gamma, lam: discount and GAE's lambda per token, inside a turn.
        config: has turn_gamma and turn_lam, those per turn; None: 1.
        whiten: over all tokens, as `gae` does.
    Returns:
        advantages, returns = advantages before whitening + values: (batch, response_len), zero where masked.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    rewards, values = at_least_float32(token_level_rewards, values)
    exists, width = turns.exists, values.shape[1]
    before = values.gather(1, turns.places("amin", width).clamp(max=width - 1))
    targets = gae_scan(turns.rewards, before, exists, None, *_per_turn(config))[1]
    # What comes after the turn is credited to its last token.
    ends = exists.nonzero()[:, 0], turns.last[exists]
    rewards = rewards.index_put(ends, (targets - turns.rewards)[exists], accumulate=True)
    continues = torch.ones_like(turns.sampled).index_put_(
        ends, torch.tensor(False, device=values.device)
    )
    advantages, returns = gae_scan(rewards, values, turns.sampled, continues, gamma, lam)
    return masked_whiten(advantages, turns.sampled) if whiten else advantages, returns


@built_in_adv_est("turn_return", "groups")
def compute_turn_return_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    config: Any = None,
    leave_one_out: bool = True,
) -> Advantages:
    """Gives each turn its discounted return less the mean return of turn k in the group's other episodes.

    A_{i,k} = G_{i,k} - mean(G_{j,k}, j != i that reached turn k), with G_{i,k} = sum_{l >= k} turn_gamma^(l-k) r_{i,l};
    nothing is subtracted where no other episode reached it. That is unbiased, though policies decide how long episodes
    are: what others do does not depend on this one. A mean that includes the episode itself (`leave_one_out` False)
    scales turn k by m / (m + 1), where m others reached it.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        config: has turn_gamma; None: 1.
    Returns: advantages, returns (G, of each token's turn): (batch, response_len), zero outside the mask.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    returns = discounted_returns(
        turns.rewards, turns.exists, _per_turn(config)[0]
    )  # (batch, turns)
    number = torch.arange(returns.shape[1], device=returns.device)
    ids = numbered(index, returns.device)[:, None] * returns.shape[1] + number
    groups = Groups(ids.flatten(), turns.exists.flatten())
    above = groups.deviation(returns.flatten().double())
    if leave_one_out:
        alone = groups.size == 1
        above = torch.where(
            alone, returns.flatten(), above * groups.size / (groups.size - 1).clamp(min=1)
        )
    return turns.spread(above.view_as(returns)), turns.spread(returns)


@built_in_adv_est("gigpo", "groups")
def compute_gigpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    anchors: Sequence[Sequence[str]],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Adds to GRPO's advantage of the episode one of each turn among those that began in the same state: GiGPO.

    A = A_episode + gigpo_step_weight * A_turn; A_turn compares the turn's discounted return with those of the group's
    turns, of any number and episode, whose anchor is the same (arXiv:2505.10978, eq. 6 to 8). A state that was met once
    says nothing: 0.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        anchors: for each episode the state that each of its turns began in.
        norm_adv_by_std_in_grpo: divide both parts by their standard deviation.
        config: has turn_gamma and gigpo_step_weight; None: 1.
    Returns: advantages, returns (the turn's discounted one): (batch, response_len), zero outside the mask.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    returns = discounted_returns(
        turns.rewards, turns.exists, _per_turn(config)[0]
    )  # (batch, turns)
    episodes, numbers = turns.exists.nonzero(as_tuple=True)
    counts = turns.exists.cumsum(1).new_tensor([len(states) for states in anchors])
    if bool((numbers >= counts[episodes]).any()):
        raise ValueError(
            f"gigpo: {int(turns.exists.sum())} turns were played, and anchors name {int(counts.sum())}"
        )
    offsets = counts.cumsum(0) - counts
    states = numbered(list(chain.from_iterable(anchors)), returns.device)[
        offsets[episodes] + numbers
    ]
    ids = (
        numbered(index, returns.device)[episodes] * (int(states.max()) + 1 if len(states) else 1)
        + states
    )
    same_state = Groups(
        torch.unique(ids, return_inverse=True)[1], torch.ones_like(ids, dtype=torch.bool)
    )
    above = same_state.deviation(returns[episodes, numbers].double())
    if norm_adv_by_std_in_grpo:
        above = above / (same_state.std(above) + epsilon)
    of_turns = torch.zeros_like(returns).index_put((episodes, numbers), above.to(returns.dtype))
    given = token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo
    whole, _ = group_advantages.compute_grpo_outcome_advantage(*given)
    weight = 1.0 if config is None else config.gigpo_step_weight
    return whole + weight * turns.spread(of_turns), turns.spread(returns)


def _per_turn(config: Any) -> tuple[float, float]:
    """Returns discount and GAE's lambda per turn."""
    return (1.0, 1.0) if config is None else (config.turn_gamma, config.turn_lam)


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
    returns = discounted_returns(token_level_rewards, response_mask)
    norms = 1 - 2 * old_log_probs.to(returns.dtype).exp() + sum_pi_squared
    if rollout_is_weights is not None:
        norms = norms * rollout_is_weights.to(returns.dtype) ** 2
    weights = torch.where(sampled, norms, 0).cumsum(-1).masked_fill_(~sampled, 0)
    none, summed = (
        returns.new_zeros(len(ids.unique()), returns.shape[1]),
        (returns * weights, weights, sampled),
    )
    products, totals, left = (none.index_add(0, ids, of_rows.to(none.dtype)) for of_rows in summed)
    # Of one row alone there is none in any case.
    alone = torch.bincount(ids, sampled.any(-1).float())[:, None] <= 1
    baselines = (products / (totals + epsilon)).masked_fill_(
        (left <= 1) if handle_zero_tail else alone, 0
    )
    return torch.where(sampled, returns - baselines[ids], 0), returns


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
    packed = {
        name: x.gather(-1, order) if isinstance(x, Tensor) else x for name, x in given.items()
    }
    results = compute_optimal_token_baseline_advantage(**packed)
    advantages, returns = (torch.zeros_like(x).scatter(-1, order, x) for x in results)
    return advantages, returns
