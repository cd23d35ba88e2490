"""Advantage estimators that go along the tokens: GAE, discounted returns, and those that take each token by itself.

Invariant: every estimator is pure, and rewards and values of masked tokens change nothing; the results are zero there.

Numbers are float32, or float64 where the rewards are.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns pass over E0
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.containers import row_blocks
from training.batch.torch_functional import at_least_float32, masked_whiten
from training.core_algos.registry import built_in_adv_est, call_adv_estimator

# Entries that a scan turns time first at once.
SCAN_ENTRIES = 1 << 23


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
    advantages, returns = torch.empty_like(values), torch.empty_like(values)
    if not values.numel():
        return advantages, returns
    tensors = (rewards, values, mask, continues, advantages, returns)
    given: list[Any] = [x if x is None else x.reshape(-1, values.shape[-1]) for x in tensors]
    for rows in row_blocks(given[1], SCAN_ENTRIES):
        block: list[Any] = [x if x is None else x[rows] for x in given]
        paid, own, inside, goes_on, scanned, summed = block
        scanned.copy_(_scan_rows(paid, own, inside, goes_on, gamma, lam).T)
        for some in row_blocks(own):
            outside = ~inside[some]
            scanned[some].masked_fill_(outside, 0)
            torch.add(scanned[some], own[some], out=summed[some]).masked_fill_(outside, 0)
    return advantages, returns


def _scan_rows(
    rewards: Tensor, values: Tensor, mask: Tensor, continues: Tensor | None, gamma: float, lam: float
) -> Tensor:
    """Scans (rows, steps): (steps, rows), in which a step of all rows is one piece of memory; masked ones hold any."""
    width, decay, zero = values.shape[1], values.new_tensor(gamma * lam), values.new_zeros(())
    holes = bool((mask[:, 1:] & ~mask[:, :-1]).any())
    advantages, decays = values.new_empty(width, len(values)), decay.expand(width)
    if holes or continues is not None:
        decays = torch.empty_like(advantages)
    for some in row_blocks(values):
        inside, own = mask[some], values[some]
        following = torch.zeros_like(own)
        torch.where(inside[:, 1:], own[:, 1:], zero, out=following[:, :-1])
        if holes:
            following = _passed_over(following, inside)
        if continues is not None:
            following.masked_fill_(~continues[some], 0)
        if decays.dim() > 1:
            slower = decay if continues is None else torch.where(continues[some], decay, zero)
            decays[:, some] = (torch.where(inside, slower, 1) if holes else slower).T
        deltas = following.mul_(gamma).add_(rewards[some]).sub_(own)
        advantages[:, some] = deltas.masked_fill_(~inside, 0).T
    steps, later = advantages.unbind(), torch.empty_like(advantages[0])
    for t in range(width - 2, -1, -1):
        steps[t].add_(torch.mul(decays[t], steps[t + 1], out=later))
    return advantages


def _passed_over(following: Tensor, mask: Tensor) -> Tensor:
    """Gives each step, of what follows sampled steps, that of the next sampled one: (rows, steps)."""
    places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    # The step before the next sampled one; of the last ones the very last, which nothing follows.
    before = torch.where(mask, places - 1, mask.shape[1] - 1)[:, 1:].flip(-1).cummin(-1).values.flip(-1)
    return following.gather(1, torch.cat([before, places[:, -1:]], dim=1))


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
    returns = discounted_returns(token_level_rewards, response_mask, 1.0 if config is None else config.gamma)
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
    advantages = torch.empty_like(returns)
    baselines = reward_baselines.to(returns.dtype).unsqueeze(-1)
    for rows in row_blocks(returns):
        torch.sub(returns[rows], baselines[rows], out=advantages[rows]).masked_fill_(~mask[rows], 0)
    return advantages, returns


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
    coef, task = (1.0, None) if config is None else (config.distillation_coef, config.distillation_task)
    (apart,) = at_least_float32(ref_log_prob - old_log_probs)
    advantages = coef * torch.where(response_mask.bool(), apart, 0)
    if task is not None:
        given = {"token_level_rewards": token_level_rewards, "response_mask": response_mask, "index": index}
        advantages = advantages + call_adv_estimator(task, **given, config=config)[0]
    return advantages, advantages
