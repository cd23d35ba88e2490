"""Rollout correction: weighs or masks tokens whose log-probs differ between engine and trainer.

With the ratio r = pi_trainer / pi_engine, tokens are weighted with it (`rollout_is`) or left out
where it is too far from 1 (`rollout_rs`). Names and thresholds are verl's. How far both are apart
is measured in offpolicy_metrics.py.

A sequence is an episode, whose tokens may stand in several rows. Which rows those are is told by
`episodes`, (batch,) int64, each row's episode from 0 on; None: every row is an episode.

    ratios of rows     [2 1] [3 .]        episodes = 0 0
    sequence weights   [6 6] [6 .]

Invariant: every function is pure; masked tokens do not count, and of a batch without any token the
weights are zero and the metrics too.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from data.names import unknown_name
from training.core_algos.correction_settings import RolloutCorrectionSettings
from training.core_algos.masked_ops import masked_mean, masked_range
from training.core_algos.offpolicy_metrics import (
    SAFETY_BOUND,
    Metrics,
    compute_offpolicy_metrics,
)

# Importance weights (batch, response_len) or None, the mask (batch, response_len), and metrics.
Corrected = tuple[Tensor | None, Tensor, Metrics]
# One number, or two as LOWER_UPPER.
Threshold = str | float | None
# What rejects tokens, or sequences by a sum, mean or maximum over their tokens; see
# `rejection_limits`.
REJECTIONS = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)

# verl's name for them.
SUPPORTED_ROLLOUT_RS_OPTIONS = frozenset(REJECTIONS)


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    episodes: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Computes importance weights of trainer against engine.

    Args:
        log_ratio, response_mask: (batch, response_len); log pi_trainer - log pi_engine, nats.
        rollout_is: token: each its own ratio; sequence: all of an episode the product of its
            tokens'.
        rollout_is_threshold: UPPER truncates weights (truncated importance sampling); LOWER_UPPER
            makes those outside zero (IcePop, arXiv:2510.18855).
        rollout_is_batch_normalize: divide by the mean weight, over tokens or over episodes.
        episodes: (batch,), see the top of this file.
    Returns:
        weights: (batch, response_len), zero outside the mask; and metrics of them.
    Raises:
        ValueError: `rollout_is` is unknown, or the threshold is no threshold.
    """
    if rollout_is not in ("token", "sequence"):
        raise ValueError(f"rollout_is={rollout_is!r} is unknown; allowed: token, sequence")
    lower, upper = _parse_threshold(rollout_is_threshold, "rollout_is_threshold")
    mask = response_mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0)
    if rollout_is == "sequence":
        of_rows = log_ratio.sum(-1, keepdim=True)  # (batch, 1)
        log_ratio = _over_episodes(of_rows, episodes, "sum").expand_as(log_ratio)

    ratio = torch.where(mask, log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0)
    if lower is None:
        inside = ratio <= upper
        weights = ratio.clamp(max=upper)
    else:
        inside = (ratio >= lower) & (ratio <= upper)
        weights = torch.where(inside, ratio, 0)

    mean = masked_mean(weights, mask)
    mean_square = masked_mean(weights**2, mask)
    # Sequences are measured by their ratios, tokens by their weights, whose bounds are known.
    measured = ratio if rollout_is == "sequence" else weights
    lowest, highest = masked_range(measured, mask)
    metrics = {
        "rollout_is_mean": mean.item(),
        "rollout_is_min": lowest.item(),
        "rollout_is_max": highest.item(),
        "rollout_is_std": (mean_square - mean**2).clamp(min=0).sqrt().item(),
        "rollout_is_eff_sample_size": (mean**2 / mean_square.clamp(min=1e-8)).item(),
        "rollout_is_oob_ratio": masked_mean((~inside).float(), mask).item(),
    }
    if rollout_is_batch_normalize:
        if rollout_is == "sequence":
            mean = _mean_of_episodes(weights.amax(-1), mask.any(-1), episodes)
        factor = mean.item() if mean > 1e-8 else 1.0
        metrics["rollout_is_batch_norm_factor"] = factor
        weights = weights / factor
    return weights, metrics


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: Threshold = None,
    episodes: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Leaves tokens, or whole episodes, out of the mask where engine and trainer are far apart.

    Args:
        log_ratio, response_mask: (batch, response_len); log pi_trainer - log pi_engine, nats.
        rollout_rs, rollout_rs_threshold: see `rejection_limits`; what breaks one of several is left
            out.
        episodes: (batch,), see the top of this file.
    Returns:
        mask: (batch, response_len) in the dtype of `response_mask`; and metrics: of each statistic
        the mean over tokens, and the shares of tokens that are left out.
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    per_token = {
        "k1": -log_ratio,
        "k2": 0.5 * log_ratio**2,
        "k3": log_ratio.exp() - 1 - log_ratio,
    }
    kept = mask
    metrics = {}
    for name, (lower, upper) in rejection_limits(rollout_rs, rollout_rs_threshold).items():
        level, kind = name.rsplit("_", 1)
        statistic = _reduce_episodes(per_token[kind], level, mask, episodes)
        is_inside = ((statistic >= lower) & (statistic <= upper)).expand_as(mask)
        kept = kept & is_inside
        mean = masked_mean(statistic.expand_as(log_ratio), mask)
        metrics[f"rollout_rs_{name}_mean"] = mean.item()
        share = masked_mean((~is_inside).float(), mask)
        metrics[f"rollout_rs_{name}_masked_fraction"] = share.item()
    metrics["rollout_rs_masked_fraction"] = masked_mean((~kept).float(), mask).item()
    return kept.to(response_mask.dtype), metrics


def _reduce_episodes(
    per_token: Tensor, level: str, mask: Tensor, episodes: Tensor | None
) -> Tensor:
    """Reduces (batch, response_len) to (batch, 1) for the levels of sequences; tokens stay."""
    if level == "token":
        return per_token
    if level == "seq_max":
        return _over_episodes(per_token.amax(-1, keepdim=True), episodes, "amax")
    total = _over_episodes(per_token.sum(-1, keepdim=True), episodes, "sum")
    if level == "seq_sum":
        return total
    tokens = _over_episodes(mask.sum(-1, keepdim=True), episodes, "sum")
    return total / tokens.clamp(min=1)


def _over_episodes(of_rows: Tensor, episodes: Tensor | None, how: Literal["sum", "amax"]) -> Tensor:
    """Gives each row what its episode's rows make together: (batch, 1) -> (batch, 1)."""
    if episodes is None:
        return of_rows
    return _of_episodes(of_rows[:, 0], episodes, how)[episodes][:, None]


def _of_episodes(of_rows: Tensor, episodes: Tensor, how: Literal["sum", "amax"]) -> Tensor:
    """Reduces the rows of each episode: (batch,) -> (episodes,)."""
    zeros = of_rows.new_zeros(int(episodes.max()) + 1)
    return zeros.scatter_reduce(0, episodes, of_rows, how, include_self=False)


def _mean_of_episodes(weights: Tensor, is_live: Tensor, episodes: Tensor | None) -> Tensor:
    """Averages what all tokens of an episode have, (batch,), over episodes with a token: 0-dim."""
    if episodes is not None:
        weights = _of_episodes(weights, episodes, "amax")
        is_live = _of_episodes(is_live.to(weights.dtype), episodes, "amax").bool()
    return masked_mean(weights, is_live)


def rejection_limits(
    rollout_rs: str, rollout_rs_threshold: Threshold
) -> dict[str, tuple[float, float]]:
    """Reads which statistics reject, with the range that each is to stay in.

    Args:
        rollout_rs: one or more of REJECTIONS, with commas between them. Of a token k1 is -log r, k2
            half its square, k3 r - 1 - log r.
        rollout_rs_threshold: one for all, or one for each: for k1 LOWER_UPPER of the ratio, or
            UPPER (LOWER is then 1 / UPPER); for k2 and k3 UPPER.
    Returns: name -> (lowest, highest) value of the statistic; of k1 both are logarithms.
    Raises:
        ValueError: a name is unknown, or a threshold is missing or no threshold.
    """
    names = [name.strip() for name in rollout_rs.split(",") if name.strip()]
    if not names:
        raise unknown_name("rollout_rs", "", REJECTIONS)
    for name in names:
        if name not in REJECTIONS:
            raise unknown_name("rollout_rs", name, REJECTIONS)
    specs = str(rollout_rs_threshold).split(",")
    if rollout_rs_threshold is None or len(specs) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={rollout_rs_threshold!r} must be one, or one for each of {names}"
        )
    if len(specs) == 1:
        specs = specs * len(names)
    limits = {}
    for name, spec in zip(names, specs, strict=True):
        limits[name] = _limits_of(name, spec)
    return limits


def _limits_of(name: str, spec: str) -> tuple[float, float]:
    """Reads the range of one statistic of REJECTIONS."""
    lower, upper = _parse_threshold(spec.strip(), f"rollout_rs_threshold of {name}")
    if name.endswith("k1"):
        if lower is None:
            lower = 1 / upper
        return math.log(lower), math.log(upper)
    if lower is not None:
        raise ValueError(f"rollout_rs_threshold={spec!r}: {name} has one bound, an upper one")
    return -math.inf, upper


def _parse_threshold(spec: Threshold, name: str) -> tuple[float | None, float]:
    """Reads a threshold, UPPER or LOWER_UPPER, as (lower or None, upper)."""
    refusal = ValueError(
        f"{name}={spec!r} must be a number above 0, or two as LOWER_UPPER (0.5_2.0)"
    )
    try:
        bounds = [float(part) for part in str(spec).split("_", 1)]
    except ValueError:
        raise refusal from None
    upper = bounds[-1]
    lower = bounds[0] if len(bounds) == 2 else None
    if not upper > 0:
        raise refusal
    # A lower bound of 0 lets every ratio below UPPER pass.
    if lower and not 0 < lower <= upper:
        raise refusal
    return lower, upper


def correct_as(
    settings: RolloutCorrectionSettings,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    episodes: Tensor | None = None,
) -> Corrected:
    """Weighs and rejects as the settings say, each where it is asked for.

    Args:
        old_log_prob, rollout_log_prob, response_mask: (batch, response_len); the trainer's and the
            engine's, nats.
        episodes: (batch,), see the top of this file.
    Returns: importance weights (batch, response_len), or None; the mask; and metrics as
        `rollout_corr/NAME`.
    """
    log_ratio = torch.where(response_mask.bool(), old_log_prob - rollout_log_prob, 0)
    weights = None
    mask = response_mask
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    if settings.rollout_is is not None:
        weights, weight_metrics = compute_rollout_correction_weights(
            log_ratio,
            mask,
            rollout_is=settings.rollout_is,
            rollout_is_threshold=settings.rollout_is_threshold,
            rollout_is_batch_normalize=settings.rollout_is_batch_normalize,
            episodes=episodes,
        )
        metrics.update(weight_metrics)
    if settings.rollout_rs is not None:
        mask, rejection_metrics = compute_rollout_rejection_mask(
            log_ratio,
            mask,
            rollout_rs=settings.rollout_rs,
            rollout_rs_threshold=settings.rollout_rs_threshold,
            episodes=episodes,
        )
        metrics.update(rejection_metrics)
    if settings.rollout_token_veto_threshold is not None:
        lowest = math.log(settings.rollout_token_veto_threshold)
        has_veto = (log_ratio < lowest).any(-1, keepdim=True)  # (batch, 1)
        vetoed = _over_episodes(has_veto.int(), episodes, "amax").bool()
        mask = mask * ~vetoed
        metrics["rollout_rs_veto_seq_fraction"] = vetoed.float().mean().item()
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}
