"""Advantage estimators that go along the tokens of an episode: GAE and returns, token by token.

Layout of a row with two turns and the environment's reply E0 between them:

    responses     = A0 A0 E0 E0 A1 A1 pad
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled

Masked tokens take no time: values, rewards and discounts go from the last token of A0 straight to
the first of A1.

Invariant: every estimator is pure, and rewards and values of masked tokens change nothing; the
results are zero there. Numbers are float32, or float64 where the rewards are.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import row_blocks
from training.core_algos.masked_ops import at_least_float32, masked_whiten
from training.core_algos.registry import Advantages, register_adv_est
from training.core_algos.verl_form import call_adv_estimator

# The scan turns blocks of about this many entries time first.
SCAN_ENTRIES = 1 << 23


def gae_scan(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    continues: Tensor | None,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Runs generalised advantage estimation backwards over the last dimension.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the
    next step that is not masked (arXiv:1506.02438, eq. 16).

    Args:
        rewards, values, mask: (..., steps) of one shape; the mask is bool.
        continues: (..., steps) bool, false where the episode ends with this very step; None: it
            ends nowhere.
        gamma, lam: discount and GAE's lambda, per step that is not masked.
    Returns:
        advantages, returns = advantages + values: (..., steps), zero where the mask is.
    """
    advantages = torch.empty_like(values)
    returns = torch.empty_like(values)
    if values.numel() == 0:
        return advantages, returns
    if continues is None:
        continues = torch.ones_like(mask)
    steps = values.shape[-1]
    row_rewards = rewards.reshape(-1, steps)
    row_values = values.reshape(-1, steps)
    row_mask = mask.reshape(-1, steps)
    row_continues = continues.reshape(-1, steps)
    # Views, through which the results are written.
    row_advantages = advantages.reshape(-1, steps)
    row_returns = returns.reshape(-1, steps)

    for rows in row_blocks(row_values, SCAN_ENTRIES):
        # Time first, so that a step of all rows is one piece of memory.
        step_values = row_values[rows].T.contiguous()  # (steps, rows), as all below
        step_mask = row_mask[rows].T.contiguous()
        scanned = _scan_time_first(
            rewards=row_rewards[rows].T.contiguous(),
            values=step_values,
            mask=step_mask,
            continues=row_continues[rows].T.contiguous(),
            gamma=gamma,
            lam=lam,
        )
        row_advantages[rows] = scanned.T
        row_returns[rows] = scanned.add_(step_values).masked_fill_(~step_mask, 0).T
    return advantages, returns


def _scan_time_first(
    *,
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    continues: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Computes the advantages of `gae_scan`, in one piece of memory; all are (steps, rows)."""
    scanned = torch.zeros_like(values)
    # One view of `scanned` a step, (rows,); three goes fill it.
    step = scanned.unbind()
    last = len(step) - 1
    decay = torch.where(mask, continues * values.new_tensor(gamma * lam), 1).unbind()

    # 1. The value of the next sampled step, V_{t+1}.
    for t in range(last, 0, -1):
        torch.where(mask[t], values[t], step[t], out=step[t - 1])

    # 2. The error delta_t = r_t + gamma V_{t+1} - V_t, zero where masked.
    scanned.mul_(continues).mul_(gamma)
    scanned.add_(rewards).sub_(values)
    scanned.masked_fill_(~mask, 0)

    # 3. The sum of errors A_t = delta_t + gamma lam A_{t+1}, which passes masked steps unchanged.
    for t in range(last - 1, -1, -1):
        step[t].add_(decay[t] * step[t + 1])
    return scanned.masked_fill_(~mask, 0)


@register_adv_est(
    "gae",
    span="episodes",
    whitens_batch=True,
    formula="sum of (gamma lam)^l delta_{t+l}, delta = reward + gamma V_next - V, then whitened",
    follows_returns=True,
)
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Advantages:
    """Estimates advantages by GAE and whitens them over all tokens of the batch.

    A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t
    (arXiv:1506.02438, eq. 16).

    Args:
        token_level_rewards: (batch, response_len).
        values: (batch, response_len), the critic's value before each token.
        response_mask: (batch, response_len), 1 on sampled tokens; masked tokens take no time: no
            discount, no reward.
        gamma, lam: discount and GAE's lambda, per sampled token.
        whiten: whether to whiten; False leaves that to the caller.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero. The returns are
        those of the advantages before whitening, plus the values. Whitened over one token or none
        the advantages are zero.
    """
    rewards, values = at_least_float32(token_level_rewards, values)
    mask = response_mask.bool()
    advantages, returns = gae_scan(rewards, values, mask, None, gamma=gamma, lam=lam)
    if whiten:
        advantages = masked_whiten(advantages, mask)
    return advantages, returns


@torch.no_grad()
def discounted_returns(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> Tensor:
    """Sums the discounted rewards from each token on, G_t = r_t + gamma G_{t+1}.

    Args:
        token_level_rewards, response_mask: (batch, response_len); masked tokens take no time.
        gamma: discount per sampled token.
    Returns: (batch, response_len), zero where the mask is zero.
    """
    (rewards,) = at_least_float32(token_level_rewards)
    mask = response_mask.bool()
    if gamma == 1.0:
        masked_rewards = torch.where(mask, rewards, 0)
        to_go = masked_rewards.flip(-1).cumsum(-1).flip(-1)
        return to_go.masked_fill_(~mask, 0)
    # GAE without a critic and with lambda 1 is the return.
    no_values = rewards.new_zeros(()).expand_as(rewards)
    returns, _ = gae_scan(rewards, no_values, mask, None, gamma=gamma, lam=1.0)
    return returns


@register_adv_est(
    "reinforce_plus_plus",
    span="episodes",
    whitens_batch=True,
    formula="return from the token on, whitened over the batch's tokens",
    follows_returns=True,
)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    whiten: bool = True,
    **kwargs: Any,
) -> Advantages:
    """Takes each token's discounted return, whitened over the batch: REINFORCE++.

    See arXiv:2501.03262.

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        config: has the discount `gamma` per sampled token; None means 1.
        whiten: whether to whiten; False leaves that to the caller.
        kwargs: are not read; what is written for verl hands them on.
    Returns:
        advantages, returns (before whitening): (batch, response_len), zero where the mask is zero.
    """
    gamma = 1.0 if config is None else config.gamma
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    advantages = returns
    if whiten:
        advantages = masked_whiten(returns, response_mask)
    return advantages, returns


@register_adv_est(
    "remax",
    span="episodes",
    formula="return - reward of a greedy answer to the same prompt",
)
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Subtracts the reward of a greedy answer to the same prompt from the return, A_t = G_t - b.

    ReMax (arXiv:2310.10505, eq. 7).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        reward_baselines: (batch,) rewards of the greedy answers.
        config, kwargs: not read; what is written for verl hands them on.
    Returns:
        advantages, returns: (batch, response_len), zero where the mask is zero.
    """
    mask = response_mask.bool()
    returns = discounted_returns(token_level_rewards, mask)
    baselines = reward_baselines.to(returns.dtype)[:, None]  # (batch, 1)
    advantages = torch.where(mask, returns - baselines, 0)
    return advantages, returns


@register_adv_est(
    "on_policy_distillation",
    formula="coefficient x (teacher's log-prob - policy's log-prob)",
    ordered=False,
)
@torch.no_grad()
def compute_on_policy_distillation_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    old_log_probs: Tensor,
    ref_log_prob: Tensor,
    index: np.ndarray | None = None,
    config: Any = None,
) -> Advantages:
    """Rewards each token with how much likelier the teacher finds it, and with nothing after it.

    A_t = c (log p_teacher(t) - log p(t)), the negative of the reverse KL's estimate at this token
    alone, as of a policy gradient with a discount of 0 (on-policy distillation, arXiv:2306.13649).
    Added to it are the task's advantages where the config names their estimator.

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        old_log_probs, ref_log_prob: (batch, response_len), the policy's and the teacher's, nats.
        index: (batch,) the group (uid) of each row, for the task's estimator.
        config: has distillation_coef, c, and distillation_task, an estimator that compares a
            group's scores, or None. Without a config c is 1.
    Returns:
        advantages, returns (the same): (batch, response_len), zero where the mask is zero.
    """
    coef = 1.0 if config is None else config.distillation_coef
    task = None if config is None else config.distillation_task
    (log_ratio,) = at_least_float32(ref_log_prob - old_log_probs)
    advantages = coef * torch.where(response_mask.bool(), log_ratio, 0)
    if task is not None:
        task_advantages, _ = call_adv_estimator(
            task,
            token_level_rewards=token_level_rewards,
            response_mask=response_mask,
            index=index,
            config=config,
        )
        advantages = advantages + task_advantages
    return advantages, advantages
