"""Advantage estimators that go along the tokens: GAE, discounted returns, and those that take each token by itself.

Invariant: every estimator is pure, and rewards and values of masked tokens change nothing; the results are zero there.

Numbers are float32, or float64 where the rewards are.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns pass over E0
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.containers import row_blocks
from training.batch.torch_functional import at_least_float32, masked_whiten
from training.core_algos.registry import call_adv_estimator, register_adv_est

# Entries that a scan turns time first at once.
SCAN_ENTRIES = 1 << 23


class HasGamma(Protocol):
    """Names the part of the algorithm config that a discounting estimator reads."""

    @property
    def gamma(self) -> float: ...


def gae_scan(
    rewards: Tensor, values: Tensor, mask: Tensor, continues: Tensor | None, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Runs generalised advantage estimation (arXiv:1506.02438, eq. 16) backwards over the last dimension.

    Args:
        rewards, values, mask: (..., steps) of one shape; the mask is bool.
        continues: (..., steps) bool, false where the episode ends with this very step; None: nowhere.
        gamma, lam: discount and GAE's lambda, per step that is not masked.
    Returns:
        advantages, returns = advantages + values: (..., steps), zero where the mask is.
    """
    width = values.shape[-1]
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    if not values.numel():
        return advantages, returns
    given: list[Any] = [x if x is None else x.reshape(-1, width) for x in (rewards, values, mask, continues)]
    for rows in row_blocks(given[1], SCAN_ENTRIES):
        # Time first: a step of all rows is then one piece of memory.
        steps: list[Any] = [x if x is None else x[rows].T.contiguous() for x in given]
        advantages.view(-1, width)[rows] = _scan_steps(steps, gamma, lam).T
    for rows in row_blocks(given[1]):
        inside = given[2][rows]
        own = advantages.view(-1, width)[rows].masked_fill_(~inside, 0)
        returns.view(-1, width)[rows] = torch.where(inside, own + given[1][rows], 0)
    return advantages, returns


def _scan_steps(steps: Sequence[Any], gamma: float, lam: float) -> Tensor:
    """Scans rewards, values, mask and continues over their first dimension; a masked step gets the next one's."""
    rewards, values, mask, continues = steps
    # First each step's next value; a masked step hands on what comes after it.
    advantages = torch.empty_like(values)
    advantages[-1:] = 0
    for t in range(len(values) - 1, 0, -1):
        torch.where(mask[t], values[t], advantages[t], out=advantages[t - 1])
    decay = torch.full_like(values, gamma * lam)
    if continues is not None:
        advantages.masked_fill_(~continues, 0)
        decay.masked_fill_(~continues, 0)
    if gamma != 1:
        advantages.mul_(gamma)
    outside = ~mask
    advantages.add_(rewards).sub_(values).masked_fill_(outside, 0)
    decay.masked_fill_(outside, 1)
    later = torch.empty_like(values[0])
    for t in range(len(values) - 2, -1, -1):
        advantages[t].add_(torch.mul(decay[t], advantages[t + 1], out=later))
    return advantages


@torch.no_grad()
def gae_advantage_return_unwhitened(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Estimates advantages by GAE (arXiv:1506.02438, eq. 16) over sampled tokens, before whitening.

    Args: see `compute_gae_advantage_return`.
    Returns:
        advantages, returns = advantages + values: (batch, response_len), zero where the mask is zero.
    """
    rewards, values = at_least_float32(token_level_rewards, values)
    return gae_scan(rewards, values, response_mask.bool(), None, gamma, lam)


@register_adv_est("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Estimates advantages by GAE (arXiv:1506.02438) and whitens them over all tokens of the batch.

    Args:
        token_level_rewards: (batch, response_len).
        values: (batch, response_len), the critic's value before each token.
        response_mask: (batch, response_len), 1 on sampled tokens; masked tokens take no time: no discount, no reward.
        gamma, lam: discount and GAE's lambda, per sampled token.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero. Returns are not whitened.
    """
    advantages, returns = gae_advantage_return_unwhitened(token_level_rewards, values, response_mask, gamma, lam)
    return masked_whiten(advantages, response_mask), returns


@torch.no_grad()
def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Sums the discounted rewards from each token on, masked tokens taking no time: (batch, response_len)."""
    (rewards,) = at_least_float32(token_level_rewards)
    mask = response_mask.bool()
    if gamma != 1.0:
        return gae_scan(rewards, rewards.new_zeros(()).expand_as(rewards), mask, None, gamma, 1.0)[0]
    returns = torch.empty_like(rewards)
    for rows in row_blocks(rewards):
        sums = torch.where(mask[rows], rewards[rows], 0).flip(-1).cumsum(-1).flip(-1)
        returns[rows] = sums.masked_fill_(~mask[rows], 0)
    return returns


@register_adv_est("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: HasGamma | None = None
) -> tuple[Tensor, Tensor]:
    """Takes each token's discounted return, whitened over the batch: REINFORCE++ (arXiv:2501.03262).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        config: gives the discount `gamma` per sampled token; None means 1.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero.
    """
    returns = discounted_returns(token_level_rewards, response_mask, 1.0 if config is None else config.gamma)
    return masked_whiten(returns, response_mask), returns


@register_adv_est("remax")
@torch.no_grad()
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
    returns = discounted_returns(token_level_rewards, response_mask)
    return torch.where(response_mask.bool(), returns - reward_baselines.to(returns.dtype).unsqueeze(-1), 0), returns


@register_adv_est("on_policy_distillation")
@torch.no_grad()
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
    coef, task = (1.0, None) if config is None else (config.distillation_coef, config.distillation_task)
    (apart,) = at_least_float32(ref_log_prob - old_log_probs)
    advantages = coef * torch.where(response_mask.bool(), apart, 0)
    if task is not None:
        given = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "index": index}
        advantages = advantages + call_adv_estimator(task, **given, config=config)[0]
    return advantages, advantages
