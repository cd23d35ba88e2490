"""Advantage estimators that compare an episode's score with its group's, or its role's.

A score is the reward of an episode, summed over its sampled tokens; every sampled token of the
episode gets the same advantage. Arguments that the estimators share:

    token_level_rewards: (batch, response_len), float32 or float64; halves are widened to float32.
    response_mask: (batch, response_len), 1 on tokens that the policy sampled.
    index: (batch,) the prompt group (uid) of each row.
    epsilon: what is added to a standard deviation that is divided by.
    norm_adv_by_std_in_grpo: whether to divide by the standard deviation of the group's scores, the
        unbiased one; estimators that never divide by it take and ignore both.
    config: the algorithm's section, or None; most do not read it, but are handed it as verl's are.
    kwargs: are not read; what is written for verl hands them on.
    returns: (advantages, returns), the same tensor twice, (batch, response_len), at least float32.

Invariant: every estimator is pure (but `rae`, which moves its running means), and rewards of masked
tokens change nothing; the results are zero there. A row without a sampled token leaves its group's
statistics. A group of one row keeps its raw score; the last one of a group whose other rows have no
sampled token gets 0.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.array_ops import row_sums
from data.names import registered
from training.core_algos.groups import ScoredGroups
from training.core_algos.masked_ops import masked_whiten
from training.core_algos.registry import Advantages, register_adv_est


@register_adv_est(
    "grpo",
    span="scores",
    formula=(
        "(score - mean of the group) / (standard deviation of the group + 1e-6); not divided with "
        "norm_adv_by_std_in_grpo=false"
    ),
    compares="group",
    ordered=True,
    aliases=("grpo_vectorized",),
)
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Compares a score with its group's, A_i = (r_i - mean r) / (std r + epsilon).

    GRPO (arXiv:2402.03300, section 4.1.2); without `norm_adv_by_std_in_grpo` the division is left
    out: Dr.GRPO (arXiv:2503.20783). Args and returns: see the top of this file.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    advantages = groups.deviations  # (batch,)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.score_std() + epsilon)
    return groups.advantages(advantages)


@register_adv_est(
    "grpo_passk",
    span="scores",
    formula="(best score - second best) / (standard deviation + 1e-6), for the best alone",
    compares="group",
    ordered=True,
)
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Rewards the best of a group alone, by how far it is above the second, as pass@k does.

    A = (r_1 - r_2) / (std r + epsilon)  (arXiv:2503.19595); where several are the best nobody gets
    anything. Without `norm_adv_by_std_in_grpo` the config's counts. Args and returns: see the top
    of this file.

    Raises:
        ValueError: a group has one row.
    """
    if norm_adv_by_std_in_grpo is None:
        norm_adv_by_std_in_grpo = config is None or config.norm_adv_by_std_in_grpo
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    if groups.alone().any():
        raise ValueError(
            "grpo_passk compares the two best of a group, and one has a single row: "
            "set rollout.n above 1"
        )
    scores = torch.where(groups.valid, groups.scores, -torch.inf)
    is_best = scores == groups.max(scores)
    number_of_best = groups.sum(is_best.double())
    second = groups.max(torch.where(is_best, -torch.inf, scores))

    wins = groups.valid & is_best & (number_of_best == 1) & (second > -torch.inf)
    advantages = torch.where(wins, groups.scores - second, 0)  # (batch,)
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.score_std() + epsilon)
    return groups.advantages(advantages)


@register_adv_est(
    "rloo",
    span="scores",
    formula="score - mean of the other members' scores",
    compares="group",
    ordered=True,
    aliases=("rloo_vectorized",),
)
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Subtracts the leave-one-out baseline, A_i = r_i - mean(r_j, j != i).

    RLOO (arXiv:2402.14740, eq. 7). Args and returns: see the top of this file.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    # r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    advantages = groups.deviations * groups.size / (groups.size - 1).clamp(min=1)  # (batch,)
    return groups.advantages(advantages)


@register_adv_est(
    "reinforce_plus_plus_baseline",
    span="scores",
    whitens_batch=True,
    formula="score - mean of the group, whitened over the batch's tokens",
    compares="group",
    ordered=True,
)
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    config: Any = None,
    whiten: bool = True,
    **kwargs: Any,
) -> Advantages:
    """Subtracts the group's mean, then whitens over all tokens of the batch.

    REINFORCE++ with a baseline (arXiv:2501.03262). `whiten` False leaves the whitening to the
    caller; the other args and returns: see the top of this file.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    advantages, _ = groups.advantages(groups.deviations)
    if whiten:
        advantages = masked_whiten(advantages, response_mask)
    return advantages, advantages


@register_adv_est(
    "opo",
    span="scores",
    formula="score - mean of the group weighted by lengths",
    compares="group",
    ordered=True,
)
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Subtracts the mean score weighted by lengths, A_i = r_i - sum_j l_j r_j / sum_j l_j.

    OPO (arXiv:2505.23585); a length l counts sampled tokens. Args and returns: see the top of this
    file.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    # Where episodes come as one place each, the mask counts the tokens there.
    lengths = row_sums(groups.response_mask).double()  # (batch,)
    baseline = groups.sum(lengths * groups.scores) / groups.sum(lengths).clamp(min=1)
    advantages = torch.where(groups.valid, groups.scores - baseline, 0)  # (batch,)
    return groups.advantages(advantages)


@register_adv_est(
    "gpg",
    span="scores",
    formula="(score - mean of the group) x rows / rows whose score is not 0",
    compares="group",
    ordered=True,
)
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """Subtracts the group's mean, and scales by the share of scores that are not zero.

    A_i = alpha B / B_nonzero (r_i - mean r) / f_norm, with B the rows of the batch that have a
    sampled token: GPG (arXiv:2504.02546). A group of one row is scaled, too. Args and returns: see
    the top of this file.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    rows = groups.valid.sum()
    nonzero_rows = groups.scores.count_nonzero().clamp(min=1)
    scale = alpha * rows / nonzero_rows / f_norm
    return groups.advantages(groups.deviations * scale, if_alone=groups.scores * scale)


@register_adv_est(
    "maxrl",
    span="scores",
    formula="(score - mean of the group) / mean of the group",
    compares="group",
    ordered=True,
)
@torch.no_grad()
def compute_maxrl_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Divides the deviation by the group's mean, A_i = (r_i - mean r) / mean r.

    MaxRL (arXiv:2602.02710): for scores of 0 or 1 it is in expectation the gradient of
    log-likelihood's expansion up to pass@(n-1), sum over k < n of pass@k / k. Where a score of the
    group is below 0, all of the group's are counted from the lowest, as a mean below 0 would reward
    the worse answer: advantages are then -1 to n - 1, as they are of scores above 0. They are 0
    where the mean is 0. Args and returns: see the top of this file.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index)
    lowest = -groups.max(torch.where(groups.valid, -groups.scores, -torch.inf))
    scores = groups.scores - lowest.clamp(max=0)  # (batch,), 0 or more
    mean = groups.mean(scores)
    is_zero = mean == 0
    deviations = groups.deviation(scores)
    advantages = torch.where(is_zero, 0, deviations / torch.where(is_zero, 1, mean))
    return groups.advantages(advantages)


@register_adv_est(
    "gdpo",
    span="scores",
    whitens_batch=True,
    formula=(
        "each kind of reward normalised in the group, summed, whitened over the batch's tokens"
    ),
    compares="group",
    ordered=False,
)
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
    non_tensor_batch: Mapping[str, Any] | None = None,
    batch: Mapping[str, Tensor] | None = None,
    whiten: bool = True,
) -> Advantages:
    """Normalises each kind of reward in its group before they are added, then whitens the sum.

    GDPO (arXiv:2601.05242). Without a config the reward is of one kind.

    Args:
        config: has gdpo_reward_keys, the names of the rewards, and gdpo_reward_weights; empty
            weights are 1 each.
        non_tensor_batch: has (batch,) numbers under these names; None counts as 0.
        batch: is not read, as the mask tells where responses end; for verl's sake.
        whiten: whether to whiten over all tokens of the batch; False leaves that to the caller.

    The other arguments, and what is returned, stand at the top of this file.
    """
    keys = () if config is None else config.gdpo_reward_keys
    weights = () if config is None else config.gdpo_reward_weights
    columns = {} if non_tensor_batch is None else non_tensor_batch
    rewards_by_kind = [_reward_of_kind(columns, key, response_mask) for key in keys]
    if not rewards_by_kind:
        rewards_by_kind = [token_level_rewards]
    if not weights:
        weights = [1.0] * len(rewards_by_kind)

    weighted = []
    for rewards, weight in zip(rewards_by_kind, weights, strict=True):
        normalised, _ = compute_grpo_outcome_advantage(
            rewards,
            response_mask,
            index,
            epsilon=epsilon,
            norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        )
        weighted.append(weight * normalised)
    advantages = sum(weighted)  # (batch, response_len)
    if whiten:
        advantages = masked_whiten(advantages, response_mask)
    return advantages, advantages


def _reward_of_kind(columns: Mapping[str, Any], key: str, response_mask: Tensor) -> Tensor:
    """Puts a column's numbers on each row's first sampled token: (batch, response_len) float64."""
    column = registered(columns, "algorithm.gdpo_reward_keys", key)
    # None: the reward function gave none for this row.
    numbers = [float(value or 0) for value in column]
    scores = torch.tensor(numbers, dtype=torch.float64, device=response_mask.device)
    sampled = response_mask.bool()
    is_first = sampled & (sampled.cumsum(-1) == 1)
    return is_first * scores[:, None]


@register_adv_est(
    "rae",
    span="scores",
    formula="score - running mean of the role's scores",
)
@torch.no_grad()
def compute_rae_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    role: np.ndarray,
    state: dict[str, float],
    decay: float = 0.95,
) -> Advantages:
    """Subtracts the running mean of its role's scores, A_i = r_i - b_role.

    RAE (arXiv:2506.24119, section 3.3).

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        role: (batch,) whom each row plays.
        state: role -> running mean, from 0 on. It moves once this batch has been compared with it,
            so that no score is compared with itself: of m scores of a role each keeps `decay`,
            b = decay^m b + (1 - decay^m) mean r.
    Returns:
        advantages, returns (the same): (batch, response_len), zero where the mask is zero.
    """
    groups = ScoredGroups.from_rewards(token_level_rewards, response_mask, index=role)
    roles = [str(name) for name in role]
    baselines = torch.tensor(
        [state.get(name, 0.0) for name in roles],
        dtype=torch.float64,
        device=groups.scores.device,
    )
    kept = decay**groups.size
    moved = kept * baselines + (1 - kept) * groups.mean(groups.scores)
    state.update(zip(roles, moved.tolist(), strict=True))
    return groups.spread(groups.scores - baselines)
