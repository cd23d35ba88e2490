"""The maths of PPO and its relatives: advantages, policy and value losses, KL, and how token losses become one number.

Invariants: every function is pure; every denominator is an explicit argument, so that a loss does not depend on how a
mini-batch was split into micro-batches or over ranks; values, log-probs and advantages outside the mask change nothing.

Layout of a row with two turns and the environment's reply between them:

    responses     = A0 A0 E0 E0 A1 A1 pad      tokens
    response_mask =  1  1  0  0  1  1  0       1 on what the policy sampled; values and returns step across holes (E0)
"""

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, Protocol, TypedDict, Unpack, get_args

import numpy as np
import torch
from torch import Tensor

from training import torch_functional as F
from training.registry import ADV_ESTIMATOR_REGISTRY as ADV_ESTIMATOR_REGISTRY
from training.registry import POLICY_LOSS_REGISTRY as POLICY_LOSS_REGISTRY
from training.registry import call_adv_estimator as call_adv_estimator
from training.registry import estimator_needs as estimator_needs
from training.registry import get_adv_estimator_fn as get_adv_estimator_fn
from training.registry import get_policy_loss_fn as get_policy_loss_fn
from training.registry import register_adv_est, register_policy_loss, unknown_name

logger = logging.getLogger(__name__)

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
MAX_LOG_RATIO = 20.0  # exp(20) is finite in every dtype that a loss is computed in


class AdvantageEstimator(StrEnum):
    """The estimators that are built in; user-registered ones go by their plain name."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"


class HasGamma(Protocol):
    """The part of the algorithm config that discounting estimators read."""

    @property
    def gamma(self) -> float: ...


class GlobalBatchInfo(TypedDict, total=False):
    """Counts over the whole mini-batch, all micro-batches and ranks together: the denominators of `agg_loss`."""

    dp_size: int  # data-parallel ranks whose gradients are averaged
    batch_num_tokens: int | Tensor | None  # tokens with mask 1
    global_batch_size: int | Tensor | None  # sequences with any such token
    loss_scale_factor: float | None  # tokens, for seq-mean-token-sum-norm


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(Mapping[str, Any]):
    """What a policy loss may read as `config`: by attribute, or by key as losses written for verl do."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None  # None: clip_ratio
    clip_ratio_high: float | None = None  # None: clip_ratio
    clip_ratio_c: float = 3.0
    loss_agg_mode: LossAggMode = "token-mean"
    policy_loss: Any = None  # the loss's own frozen sub-config
    global_batch_info: GlobalBatchInfo = field(default_factory=GlobalBatchInfo)

    def __getitem__(self, key: str) -> Any:
        return {f.name: getattr(self, f.name) for f in fields(self)}[key]

    def __iter__(self) -> Iterator[str]:
        return (f.name for f in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


# Advantages over time: rewards, values, masks are (batch, response_len); rewards outside the mask are not seen


def _gae_scan(
    rewards: Tensor, values: Tensor, mask: Tensor, continues: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE backwards over the last dimension; `continues` is 0 where the episode ends with this very step."""
    next_value = running = torch.zeros_like(values[..., 0])
    columns = []
    for t in reversed(range(values.shape[-1])):
        decay = gamma * continues[..., t]
        delta = rewards[..., t] + decay * next_value - values[..., t]
        # A masked step leaves both untouched: the token before a hole sees the one after it as its successor.
        running = torch.where(mask[..., t], delta + decay * lam * running, running)
        next_value = torch.where(mask[..., t], values[..., t], next_value)
        columns.append(running)
    advantages = torch.stack(columns[::-1], dim=-1).masked_fill(~mask, 0)
    return advantages, torch.where(mask, advantages + values, 0)


@torch.no_grad()
def gae_advantage_return_unwhitened(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16) over sampled tokens, before whitening.

    Args: see `compute_gae_advantage_return`.
    Returns:
        advantages, returns = advantages + values: (batch, response_len) float32, zero where the mask is zero.
    """
    values = values.float()
    mask = response_mask.bool()
    return _gae_scan(token_level_rewards.float(), values, mask, torch.ones_like(values), gamma, lam)


@register_adv_est(AdvantageEstimator.GAE, needs=("values",))
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv:1506.02438), advantages whitened over all tokens of the batch.

    Args:
        token_level_rewards: (batch, response_len).
        values: (batch, response_len), the critic's value before each token.
        response_mask: (batch, response_len), 1 on sampled tokens; holes take no time: no discount, no reward.
        gamma, lam: discount and GAE's lambda, per sampled token.
    Returns:
        advantages, returns: (batch, response_len) float32, zero where the mask is zero. Returns are not whitened.
    """
    advantages, returns = gae_advantage_return_unwhitened(token_level_rewards, values, response_mask, gamma, lam)
    return F.masked_whiten(advantages, response_mask), returns


@torch.no_grad()
def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return-to-go of every sampled token, carried undiscounted across holes: (batch, response_len) float32."""
    rewards = token_level_rewards.float()
    zeros = torch.zeros_like(rewards)
    return _gae_scan(rewards, zeros, response_mask.bool(), torch.ones_like(rewards), gamma, 1.0)[0]


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: HasGamma | None = None
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv:2501.03262): the discounted return of each token, whitened over the batch.

    Args:
        token_level_rewards, response_mask: (batch, response_len).
        config: gives the discount `gamma` per sampled token; None means 1.
    Returns:
        advantages, returns: (batch, response_len) float32, zero where the mask is zero.
    """
    returns = discounted_returns(token_level_rewards, response_mask, 1.0 if config is None else config.gamma)
    return F.masked_whiten(returns, response_mask), returns


# Advantages over groups: one score per row, compared with the other rows of its prompt


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


@dataclass(frozen=True)
class _GroupedScores:
    """Each row's summed reward beside its group's statistics; (batch,) float64, rows without a sampled token left out.

    float64, because a group of equal scores must have a deviation of zero and not of a rounding error over epsilon.
    """

    ids: Tensor
    live: Tensor
    scores: Tensor
    size: Tensor
    deviation: Tensor  # score minus the group's mean

    def total(self, per_row: Tensor) -> Tensor:
        return _group_total(per_row, self.ids)

    def advantages(self, compared: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Spreads `compared` (batch,) over each row's sampled tokens; a group of one keeps its raw score."""
        alone = self.live & (self.size == 1)
        if alone.any():
            _warn_once("some groups have a single usable sample: it keeps its raw score as advantage (rollout.n > 1?)")
        per_row = torch.where(alone, self.scores, compared).float().unsqueeze(-1)  # (batch, 1)
        advantages = torch.where(response_mask.bool(), per_row, 0)  # (batch, response_len)
        return advantages, advantages


def _group_total(per_row: Tensor, ids: Tensor) -> Tensor:
    """For each row the sum of `per_row` over its group: (batch,)."""
    return torch.zeros_like(per_row).index_add(0, ids, per_row)[ids]


def _grouped_scores(token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray) -> _GroupedScores:
    keys = np.asarray(index)
    if keys.shape != token_level_rewards.shape[:1]:
        raise ValueError(f"index has shape {keys.shape}; it names the group of each of {len(token_level_rewards)} rows")
    # As strings: object arrays may mix uids with numbers, which cannot be sorted together.
    ids = torch.from_numpy(np.unique(keys.astype(str), return_inverse=True)[1]).to(token_level_rewards.device)
    live = response_mask.bool().any(-1)
    scores = torch.where(response_mask.bool(), token_level_rewards, 0).sum(-1, dtype=torch.float64)
    size = _group_total(live.double(), ids)
    deviation = torch.where(live, scores - _group_total(scores, ids) / size.clamp(min=1), 0)
    return _GroupedScores(ids, live, scores, size, deviation)


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
    """Group-relative advantage, A_i = (r_i - mean r) / (std r + epsilon)  (arXiv:2402.03300, section 4.1.2).

    Args:
        token_level_rewards: (batch, response_len); a row's score is their sum over sampled tokens.
        response_mask: (batch, response_len), 1 on sampled tokens. A row without any leaves its group's statistics.
        index: (batch,) the prompt group (uid) of each row.
        norm_adv_by_std_in_grpo: False leaves out the division: Dr.GRPO (arXiv:2503.20783). The std is the unbiased one.
        config: not read; estimators are handed it by verl's convention.
    Returns:
        advantages, returns (the same): (batch, response_len) float32, zero where the mask is zero.
    A group of one row keeps its raw score.
    """
    group = _grouped_scores(token_level_rewards, response_mask, index)
    if not norm_adv_by_std_in_grpo:
        return group.advantages(group.deviation, response_mask)
    std = (group.total(group.deviation**2) / (group.size - 1).clamp(min=1)).sqrt()
    return group.advantages(group.deviation / (std + epsilon), response_mask)


@register_adv_est(AdvantageEstimator.RLOO, needs=("index",))
@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED, needs=("index",))
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None
) -> tuple[Tensor, Tensor]:
    """Leave-one-out baseline, A_i = r_i - mean(r_j, j != i)  (arXiv:2402.14740, eq. 7).

    Args and returns as in `compute_grpo_outcome_advantage`. A group of one row keeps its raw score.
    """
    group = _grouped_scores(token_level_rewards, response_mask, index)
    # r_i - (sum - r_i)/(n - 1) = (r_i - mean) n/(n - 1)
    return group.advantages(group.deviation * group.size / (group.size - 1).clamp(min=1), response_mask)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


@torch.no_grad()
def estimate_advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """GAE with episode ends instead of a mask, for trajectories of steps; nothing is bootstrapped past the last step.

    Args: rewards, values, dones: (..., steps); dones is 1 on the step that ends its episode.
    Returns: advantages (not whitened), returns: (..., steps) float32.
    """
    values = values.float()
    everywhere = torch.ones_like(values, dtype=torch.bool)
    return _gae_scan(rewards.float(), values, everywhere, 1.0 - dones.float(), gamma, lam)


# Losses


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: LossAggMode,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Turns token losses into a scalar, times dp_size because ranks average their gradients.

    Args:
        loss_mat, loss_mask: (batch, response_len).
        loss_agg_mode:
            token-mean: sum over tokens / batch_num_tokens.
            token-sum: sum over tokens.
            seq-mean-token-sum, seq-mean-token-mean: each sequence's sum or mean, summed / global_batch_size.
            seq-mean-token-sum-norm: seq-mean-token-sum / loss_scale_factor (default: response_len of this very tensor).
        batch_num_tokens, global_batch_size: tokens, and sequences with any token, of the whole mini-batch over all
            ranks; by default those in `loss_mask`. With them, the losses of micro-batches sum to the mini-batch's.
    Returns: 0-dim; 0 with a gradient path where nothing is masked in.
    Raises: ValueError for an unknown mode, or when dp_size > 1 and the count that the mode divides by is missing.
    """
    if loss_agg_mode not in LOSS_AGG_MODES:
        raise unknown_name("loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    mask = loss_mask.bool()
    masked = torch.where(mask, loss_mat, 0)
    if loss_agg_mode == "token-sum":
        return masked.sum() * dp_size
    if loss_agg_mode == "token-mean":
        return masked.sum() / _denominator("batch_num_tokens", batch_num_tokens, dp_size, mask) * dp_size
    sequences = _denominator("global_batch_size", global_batch_size, dp_size, mask.any(-1))
    if loss_agg_mode == "seq-mean-token-mean":
        return (masked.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences * dp_size
    scale = 1.0
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor
    return masked.sum() / sequences / scale * dp_size


def _denominator(name: str, count: int | Tensor | None, dp_size: int, counted: Tensor) -> Tensor:
    if count is None and dp_size > 1:
        raise ValueError(f"dp_size={dp_size} needs {name}, the count over all ranks: a rank cannot know it by itself")
    return (counted.sum() if count is None else torch.as_tensor(count)).clamp(min=1)


def _token_fraction(per_token: Tensor, mask: Tensor, counts: Mapping[str, Any]) -> Tensor:
    """Detached share or mean over tokens; with global counts, micro-batches and ranks add up to the mini-batch's."""
    local_counts = {**counts, "dp_size": 1}
    return agg_loss(per_token.detach().float(), mask, "token-mean", **local_counts)


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
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), bounded by c * |A| where A < 0 (arXiv:1912.09729, eq. 5).

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
        raise ValueError(
            f"clip_ratio_c={config.clip_ratio_c} must be above 1: it bounds the ratio where A < 0, 3.0 is usual"
        )
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
        "actor/pg_clipfrac": _token_fraction(clipped > unclipped, response_mask, counts),
        "actor/ppo_kl": _token_fraction(-log_ratio, response_mask, counts),
        "actor/pg_clipfrac_lower": _token_fraction((pessimistic > bound) & negative, response_mask, counts),
    }
    return agg_loss(token_loss, response_mask, loss_agg_mode, **counts), metrics


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float = 0.2,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: LossAggMode = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The older form of the vanilla loss: returns (loss, clip fraction, KL, lower clip fraction), each 0-dim."""
    config = PolicyLossConfig(
        clip_ratio=cliprange, clip_ratio_low=cliprange_low, clip_ratio_high=cliprange_high, clip_ratio_c=clip_ratio_c
    )
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return loss, metrics["actor/pg_clipfrac"], metrics["actor/ppo_kl"], metrics["actor/pg_clipfrac_lower"]


def compute_ppo_loss(
    old_log_probs: Tensor,
    new_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig | None = None,
) -> Tensor:
    """The vanilla loss alone, aggregated as `config.loss_agg_mode` says."""
    config = PolicyLossConfig() if config is None else config
    return compute_policy_loss_vanilla(
        old_log_probs, new_log_probs, advantages, response_mask, config.loss_agg_mode, config
    )[0]


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> tuple[Tensor, Tensor]:
    """Half the squared error, the larger of that of the prediction and of the prediction kept near the old value.

    Args:
        vpreds, returns, values, response_mask: (batch, response_len); `values` are the predictions before the update.
        cliprange_value: how far, in units of value, a prediction may move from `values` before its gradient stops.
        counts: the denominators of `agg_loss`.
    Returns: loss and detached fraction of tokens where the clipped error was the larger, both 0-dim.
    """
    vpreds = torch.where(response_mask.bool(), vpreds, 0)
    kept_near = F.clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    error, clipped_error = (vpreds - returns) ** 2, (kept_near - returns) ** 2
    loss = 0.5 * agg_loss(torch.maximum(error, clipped_error), response_mask, loss_agg_mode, **counts)
    return loss, _token_fraction(clipped_error > error, response_mask, counts)


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: LossAggMode = "token-mean",
    **counts: Unpack[GlobalBatchInfo],
) -> Tensor:
    """The policy's entropy in nats, from logits (batch, response_len, vocabulary), aggregated as `agg_loss` does."""
    return agg_loss(F.entropy_from_logits(logits), response_mask, loss_agg_mode, **counts)


# KL divergence from the reference


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) from sampled tokens (http://joschu.net/blog/kl-approx.html).

    Args:
        logprob, ref_logprob: any shape, nats.
        kl_penalty: kl|k1: log-ratio; abs: its magnitude; mse|k2: half its square; low_var_kl|k3: r - 1 - log r with
            r = ref / policy, log r clamped to +-20 and the result to +-10. A `+` at the end keeps the value but takes
            the gradient of k2, whose expectation is the KL's true gradient.
    """
    kind = kl_penalty.removesuffix("+")
    if kind not in KL_KINDS:
        raise unknown_name("kl_penalty", kl_penalty, [*KL_KINDS, *(f"{name}+" for name in KL_KINDS)])
    log_ratio = logprob - ref_logprob
    k2 = 0.5 * log_ratio**2
    if kind in ("kl", "k1"):
        estimate = log_ratio
    elif kind == "abs":
        estimate = log_ratio.abs()
    elif kind in ("mse", "k2"):
        estimate = k2
    else:
        reverse = (-log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        estimate = (reverse.exp() - reverse - 1).clamp(-10.0, 10.0)
    return estimate.detach() + k2 - k2.detach() if kl_penalty.endswith("+") else estimate


def compute_kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token KL, the plain log-ratio (k1), of the inputs' shape."""
    return kl_penalty(log_probs, ref_log_probs, "kl")


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Scores less `kl_ratio` times the per-token KL (k1): (batch, response_len)."""
    return token_level_scores - kl_ratio * compute_kl_penalty(old_log_prob, ref_log_prob)


class AdaptiveKLController:
    """Moves the KL coefficient so that the KL approaches a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl needs target_kl > 0 and horizon > 0; given {target_kl} and {horizon}")
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """One step of control after `n_steps` samples whose mean KL was `current_kl` nats."""
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


class FixedKLController:
    """A KL coefficient that stays."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing; there so that the two controllers are called alike."""


class KLControlConfig(Protocol):
    """`algorithm.kl_ctrl`."""

    @property
    def type(self) -> str: ...
    @property
    def kl_coef(self) -> float: ...
    @property
    def horizon(self) -> float: ...
    @property
    def target_kl(self) -> float: ...


def get_kl_controller(kl_ctrl: KLControlConfig) -> AdaptiveKLController | FixedKLController:
    """The controller that `algorithm.kl_ctrl` describes: type fixed or adaptive."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise unknown_name("algorithm.kl_ctrl.type", kl_ctrl.type, ["fixed", "adaptive"])
