"""Advantage estimators: from rewards per token to advantages and returns, for each name that `adv_estimator` may have.

Invariant: every estimator is pure, and rewards and values of masked tokens change nothing; the results are zero there.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns pass over E0
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data.containers import row_blocks
from training.batch.torch_functional import masked_whiten
from training.core_algos.registry import register_adv_est

logger = logging.getLogger(__name__)


class AdvantageEstimator(StrEnum):
    """Names the estimators that are built in; user-registered ones go by their plain name."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


class HasGamma(Protocol):
    """Names the part of the algorithm config that a discounting estimator reads."""

    @property
    def gamma(self) -> float: ...


def gae_scan(
    rewards: Tensor, values: Tensor, mask: Tensor, continues: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Runs generalised advantage estimation (arXiv:1506.02438, eq. 16) backwards over the last dimension.

    Args:
        rewards, values, mask: (..., steps) of one shape; the mask is bool.
        continues: (..., steps), 0 where the episode ends with this very step, else 1.
        gamma, lam: discount and GAE's lambda, per step that is not masked.
    Returns:
        advantages, returns = advantages + values: (..., steps), zero where the mask is.
    """
    advantages, width = torch.empty_like(mask, dtype=values.dtype), values.shape[-1]
    flat, out = [x.reshape(-1, width) for x in (rewards, values, mask, continues)], advantages.view(-1, width)
    for rows in row_blocks(out, 1 << 25):
        # Time first: a step of all rows is then one piece of memory.
        out[rows] = _scan_steps([x[rows].T.contiguous() for x in flat], gamma, lam).T
    advantages.masked_fill_(~mask, 0)
    return advantages, torch.where(mask, advantages + values, 0)


def _scan_steps(steps: Sequence[Tensor], gamma: float, lam: float) -> Tensor:
    """Scans rewards, values, mask and continues over their first dimension; a masked step gets the next one's."""
    rewards, values, mask, continues = steps
    next_value = running = torch.zeros_like(values[0])
    advantages = torch.empty_like(values)
    for t in reversed(range(len(values))):
        decay = gamma * continues[t]
        delta = rewards[t] + decay * next_value - values[t]
        # A masked step leaves both untouched: the step before masked ones has the step after them as its successor.
        running = torch.where(mask[t], delta + decay * lam * running, running)
        next_value = torch.where(mask[t], values[t], next_value)
        advantages[t] = running
    return advantages


@torch.no_grad()
def gae_advantage_return_unwhitened(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Estimates advantages by GAE (arXiv:1506.02438, eq. 16) over sampled tokens, before whitening.

    Args: see `compute_gae_advantage_return`.
    Returns:
        advantages, returns = advantages + values: (batch, response_len) float32, zero where the mask is zero.
    """
    values = values.float()
    mask = response_mask.bool()
    return gae_scan(token_level_rewards.float(), values, mask, values.new_ones(()).expand_as(values), gamma, lam)


@register_adv_est(AdvantageEstimator.GAE, needs=("values",))
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
        advantages, returns: (batch, response_len) float32, zero where the mask is zero. Returns are not whitened.
    """
    advantages, returns = gae_advantage_return_unwhitened(token_level_rewards, values, response_mask, gamma, lam)
    return masked_whiten(advantages, response_mask), returns


@torch.no_grad()
def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Sums the discounted rewards from each token on, masked tokens taking no time: (batch, response_len) float32."""
    rewards = token_level_rewards.float()
    zeros, ones = (rewards.new_full((), x).expand_as(rewards) for x in (0, 1))
    return gae_scan(rewards, zeros, response_mask.bool(), ones, gamma, 1.0)[0]


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: HasGamma | None = None
) -> tuple[Tensor, Tensor]:
    """Takes each token's discounted return, whitened over the batch: REINFORCE++ (arXiv:2501.03262).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        config: gives the discount `gamma` per sampled token; None means 1.
    Returns:
        advantages, returns: (batch, response_len) float32, zero where the mask is zero.
    """
    returns = discounted_returns(token_level_rewards, response_mask, 1.0 if config is None else config.gamma)
    return masked_whiten(returns, response_mask), returns


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


@dataclass(frozen=True)
class _GroupedScores:
    """Holds each row's summed reward beside its group's statistics: (batch,), rows without a sampled token left out.

    In float64, because a group of equal scores must have a deviation of zero and not of a rounding error over epsilon.
    `deviation` is the score minus the group's mean; `members` counts a group's rows, `size` those with a sampled token.
    """

    ids: Tensor
    live: Tensor
    scores: Tensor
    members: Tensor
    size: Tensor
    deviation: Tensor

    def advantages(self, compared: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Spreads `compared` (batch,) over each row's sampled tokens; a group of one keeps its raw score.

        One whose other members were masked away has nothing to be compared with: 0, as its deviation is.
        """
        alone = self.live & (self.members == 1)
        if alone.any():
            _warn_once("some groups have a single sample: it keeps its raw score as advantage (rollout.n > 1?)")
        per_row = torch.where(alone, self.scores, compared).float().unsqueeze(-1)  # (batch, 1)
        advantages = torch.where(response_mask.bool(), per_row, 0)  # (batch, response_len)
        return advantages, advantages


def _group_total(per_row: Tensor, ids: Tensor) -> Tensor:
    """Sums `per_row` over each row's group: (batch,)."""
    return torch.zeros_like(per_row).index_add(0, ids, per_row)[ids]


def _grouped_scores(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray) -> _GroupedScores:
    keys = np.asarray(index)
    if keys.shape != token_level_rewards.shape[:1]:
        raise ValueError(f"index has shape {keys.shape}; it names the group of each of {len(token_level_rewards)} rows")
    # As strings: object arrays may mix uids with numbers, which cannot be sorted together.
    ids = torch.from_numpy(np.unique(keys.astype(str), return_inverse=True)[1]).to(token_level_rewards.device)
    sampled, blocks = response_mask.bool(), row_blocks(response_mask)
    live = sampled.any(-1)
    scores = torch.cat(
        [torch.where(sampled[rows], token_level_rewards[rows], 0).sum(-1, dtype=torch.float64) for rows in blocks]
    )
    size = _group_total(live.double(), ids)
    deviation = torch.where(live, scores - _group_total(scores, ids) / size.clamp(min=1), 0)
    return _GroupedScores(ids, live, scores, _group_total(torch.ones_like(scores), ids), size, deviation)


@register_adv_est(AdvantageEstimator.GRPO, needs=("index",))
@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED, needs=("index",))
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """Compares a score with its group, A_i = (r_i - mean r) / (std r + epsilon)  (arXiv:2402.03300, section 4.1.2).

    Args:
        token_level_rewards: (batch, response_len); a row's score is their sum over sampled tokens.
        response_mask: (batch, response_len), 1 on sampled tokens. A row without any leaves its group's statistics.
        index: (batch,) the prompt group (uid) of each row.
        norm_adv_by_std_in_grpo: False leaves out the division: Dr.GRPO (arXiv:2503.20783). The std is the unbiased one.
        config: not read; estimators are handed it by verl's convention.
    Returns:
        advantages, returns (the same): (batch, response_len) float32, zero where the mask is zero.
    A group of one row keeps its raw score; the last one of a group whose other rows have no sampled token gets 0.
    """
    group = _grouped_scores(token_level_rewards, response_mask, index)
    if not norm_adv_by_std_in_grpo:
        return group.advantages(group.deviation, response_mask)
    std = (_group_total(group.deviation**2, group.ids) / (group.size - 1).clamp(min=1)).sqrt()
    return group.advantages(group.deviation / (std + epsilon), response_mask)


@register_adv_est(AdvantageEstimator.RLOO, needs=("index",))
@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED, needs=("index",))
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None
) -> tuple[Tensor, Tensor]:
    """Subtracts the leave-one-out baseline, A_i = r_i - mean(r_j, j != i)  (arXiv:2402.14740, eq. 7).

    Args and returns as in `compute_grpo_outcome_advantage`, groups of one row too.
    """
    group = _grouped_scores(token_level_rewards, response_mask, index)
    # r_i - (sum - r_i)/(n - 1) = (r_i - mean) n/(n - 1)
    return group.advantages(group.deviation * group.size / (group.size - 1).clamp(min=1), response_mask)
