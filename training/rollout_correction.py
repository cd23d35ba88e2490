"""Rollout correction: engine and trainer differ in the log-probs of the same tokens, which is measured and corrected.

With the ratio r = pi_trainer / pi_engine, tokens are weighted with it (`rollout_is`) or left out where it is too far
from 1 (`rollout_rs`). Names and thresholds are verl's. Invariant: every function is pure; masked tokens do not count,
and of a batch without any token the weights are zero and the metrics too.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from data.containers import row_blocks
from data.protocol import DataProto
from data.texts import unknown_name
from training.batch.torch_functional import at_least_float32, masked_mean
from training.config.algorithm_settings import RolloutCorrectionConfig

Metrics = dict[str, float]
# Importance weights or None, the mask, and metrics.
Corrected = tuple[DataProto | None, Tensor, Metrics]
# One number, or two as LOWER_UPPER.
Threshold = str | float | None
# Bound of a log-ratio before its exponential.
SAFETY_BOUND = 20.0
# What rejects tokens, or sequences by a sum, mean or maximum over their tokens; see `rejection_limits`.
_SUMMED = (
    f"{level}_{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in ("k1", "k2", "k3")
)
REJECTIONS = (*_SUMMED, "seq_max_k2", "seq_max_k3")
# Edges of a histogram of log-ratios, which percentiles are read off.
EDGES = tuple(
    sorted(sign * x for x in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0) for sign in (-1, 1))
)
BIN = "training/rollout_ratio_bin/"


def _pair(spec: Threshold, name: str) -> tuple[float | None, float]:
    """Reads a threshold, UPPER or LOWER_UPPER; each is above 0."""
    try:
        lower, upper = ([None] + [float(part) for part in str(spec).split("_", 1)])[-2:]
    except ValueError:
        lower, upper = None, None
    if isinstance(spec, bool) or upper is None or not 0 < (lower or upper) <= upper:
        raise ValueError(
            f"{name}={spec!r} must be a number above 0, or two as LOWER_UPPER (0.5_2.0)"
        )
    return lower, upper


def rejection_limits(
    rollout_rs: str, rollout_rs_threshold: Threshold
) -> dict[str, tuple[float, float]]:
    """Reads which statistics reject, with the range that each is to stay in.

    Args:
        rollout_rs: one or more of REJECTIONS, with commas between them. Of a token k1 is -log r, k2 half its square, k3
            r - 1 - log r.
        rollout_rs_threshold: one for all, or one for each: for k1 LOWER_UPPER of the ratio, or UPPER (LOWER is then
            1 / UPPER); for k2 and k3 UPPER.
    """
    names = [name.strip() for name in rollout_rs.split(",") if name.strip()]
    if unknown := [name for name in names or [""] if name not in REJECTIONS]:
        raise unknown_name("rollout_rs", unknown[0], REJECTIONS)
    specs = str(rollout_rs_threshold).split(",")
    if rollout_rs_threshold is None or len(specs) not in (1, len(names)):
        raise ValueError(
            f"rollout_rs_threshold={rollout_rs_threshold!r} must be one, or one for each of {names}"
        )
    limits: dict[str, tuple[float, float]] = {}
    for name, spec in zip(names, specs * len(names) if len(specs) == 1 else specs, strict=False):
        lower, upper = _pair(spec.strip(), f"rollout_rs_threshold of {name}")
        if name.endswith("k1"):
            limits[name] = math.log(1 / upper if lower is None else lower), math.log(upper)
        elif lower is not None:
            raise ValueError(f"rollout_rs_threshold={spec!r}: {name} has one bound, an upper one")
        else:
            limits[name] = -math.inf, upper
    return limits


@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
) -> tuple[Tensor, Metrics]:
    """Computes importance weights of trainer against engine.

    Args:
        log_ratio, response_mask: (batch, response_len); log pi_trainer - log pi_engine, nats.
        rollout_is: token: each its own ratio; sequence: all of a row the product of its tokens'.
        rollout_is_threshold: UPPER truncates weights (truncated importance sampling); LOWER_UPPER makes those outside
            zero (IcePop, arXiv:2510.18855).
        rollout_is_batch_normalize: divide by the mean weight, over tokens or over rows.
    Returns:
        weights: (batch, response_len), zero outside the mask; and metrics of them.
    """
    if rollout_is not in ("token", "sequence"):
        raise ValueError(f"rollout_is={rollout_is!r} is unknown; allowed: token, sequence")
    lower, upper = _pair(rollout_is_threshold, "rollout_is_threshold")
    mask = response_mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0)
    if rollout_is == "sequence":
        log_ratio = log_ratio.sum(-1, keepdim=True).expand_as(log_ratio)
    raw = torch.where(mask, log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp(), 0)
    inside = (raw >= (lower or 0)) & (raw <= upper)
    weights = raw.clamp(max=upper) if lower is None else torch.where(inside, raw, 0)
    mean, square = masked_mean(weights, mask), masked_mean(weights**2, mask)
    metrics = {
        "rollout_is_mean": mean.item(),
        "rollout_is_eff_sample_size": (mean**2 / square.clamp(min=1e-8)).item(),
        "rollout_is_oob_ratio": masked_mean((~inside).float(), mask).item(),
    }
    if rollout_is_batch_normalize:
        if rollout_is == "sequence":
            mean = masked_mean(weights.amax(-1), mask.any(-1))
        metrics["rollout_is_batch_norm_factor"] = mean.item() if mean > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights, metrics


@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: Threshold = None,
) -> tuple[Tensor, Metrics]:
    """Leaves tokens, or whole rows, out of the mask where engine and trainer are too far apart.

    Args:
        log_ratio, response_mask: (batch, response_len); log pi_trainer - log pi_engine, nats.
        rollout_rs, rollout_rs_threshold: see `rejection_limits`; what breaks one of several is left out.
    Returns:
        mask: (batch, response_len) in the given one's dtype; and metrics: the shares of tokens that are left out.
    """
    mask = response_mask.bool()
    log_ratio = torch.where(mask, log_ratio, 0).clamp(-SAFETY_BOUND, SAFETY_BOUND)
    kinds = {"k1": -log_ratio, "k2": 0.5 * log_ratio**2, "k3": log_ratio.exp() - 1 - log_ratio}
    kept, metrics = mask, {}
    for name, (lower, upper) in rejection_limits(rollout_rs, rollout_rs_threshold).items():
        level, kind = name.rsplit("_", 1)
        statistic = kinds[kind]
        if level != "token":
            reduced = statistic.amax(-1, True) if level == "seq_max" else statistic.sum(-1, True)
            statistic = (
                reduced / mask.sum(-1, True).clamp(min=1) if level == "seq_mean" else reduced
            )
        good = ((statistic >= lower) & (statistic <= upper)).expand_as(mask)
        kept = kept & good
        metrics[f"rollout_rs_{name}_masked_fraction"] = masked_mean((~good).float(), mask).item()
    metrics["rollout_rs_masked_fraction"] = masked_mean((~kept).float(), mask).item()
    return kept.to(response_mask.dtype), metrics


def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, **settings: Any
) -> Corrected:
    """Weighs and rejects, each where it is asked for.

    Args:
        old_log_prob, rollout_log_prob, response_mask: (batch, response_len); the trainer's and the engine's, nats.
        settings: rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold as of
            the two functions above; rollout_token_veto_threshold: a row is left out where a token's ratio is below it.
    Returns: a DataProto with `rollout_is_weights`, or None; the mask; and metrics as `rollout_corr/NAME`.
    """
    return correct_as(
        RolloutCorrectionConfig(**settings), old_log_prob, rollout_log_prob, response_mask
    )


def correct_as(
    settings: RolloutCorrectionConfig,
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
) -> Corrected:
    """Is `compute_rollout_correction_and_rejection_mask` with the settings of `algorithm.rollout_correction`."""
    log_ratio = torch.where(response_mask.bool(), old_log_prob - rollout_log_prob, 0)
    weights, mask = None, response_mask
    metrics = compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    if settings.rollout_is is not None:
        limits = settings.rollout_is_threshold, settings.rollout_is_batch_normalize
        tensor, own = compute_rollout_correction_weights(
            log_ratio, mask, settings.rollout_is, *limits
        )
        weights, metrics = (
            DataProto.from_dict(tensors={"rollout_is_weights": tensor}),
            metrics | own,
        )
    if settings.rollout_rs is not None:
        mask, own = compute_rollout_rejection_mask(
            log_ratio, mask, settings.rollout_rs, settings.rollout_rs_threshold
        )
        metrics |= own
    if settings.rollout_token_veto_threshold is not None:
        vetoed = (log_ratio < math.log(settings.rollout_token_veto_threshold)).any(-1, keepdim=True)
        mask = mask * ~vetoed
        metrics["rollout_rs_veto_seq_fraction"] = vetoed.float().mean().item()
    return weights, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Metrics:
    """Measures how far trainer and engine are apart.

    Args: old_log_prob, rollout_log_prob, response_mask: (batch, response_len); the trainer's and the engine's, nats.
    Returns: perplexities of both (means over rows), kl and k3_kl (engine against trainer, nats per token), chi2_token
        (mean r^2 - 1) and chi2_seq (of the rows' products).
    """
    mask, summed = response_mask.bool(), []
    for rows in row_blocks(mask):
        given = at_least_float32(old_log_prob[rows], rollout_log_prob[rows])
        training, rollout = (torch.where(mask[rows], log_probs, 0) for log_probs in given)
        near = (training - rollout).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        per_token = (
            mask[rows].to(near.dtype),
            training,
            rollout,
            near.expm1() - near,
            (2 * near).expm1(),
        )
        summed.append(torch.stack([tensor.sum(-1, dtype=torch.float64) for tensor in per_token]))
    lengths, training, rollout, k3, chi2 = torch.cat(summed, dim=1)  # (batch,) each
    tokens, log_ratio = lengths.sum().clamp(min=1), training - rollout
    of_rows = {
        "training": -training / lengths.clamp(min=1),
        "rollout": -rollout / lengths.clamp(min=1),
    }
    apart, products = (
        of_rows["training"] - of_rows["rollout"],
        log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND),
    )
    over_rows = {"log_ppl_diff": apart, "log_ppl_abs_diff": apart.abs(), "ppl_ratio": apart.exp()}
    over_rows["chi2_seq"] = (2 * products).expm1()
    metrics = {
        "kl": -log_ratio.sum() / tokens,
        "k3_kl": k3.sum() / tokens,
        "chi2_token": chi2.sum() / tokens,
    }
    for name, means in of_rows.items():
        over_rows |= {f"{name}_ppl": means.exp(), f"{name}_log_ppl": means}
    metrics |= {name: masked_mean(per_row, lengths > 0) for name, per_row in over_rows.items()}
    return {name: value.item() for name, value in metrics.items()}


def measure_mismatch(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    batch_num_tokens: int | None = None,
    turn_ids: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measures how far the engine's probabilities of its own samples are from the trainer's, in parts of a batch.

    Args:
        log_probs, rollout_log_probs: (batch, response_len), nats.
        batch_num_tokens: tokens of the whole of which this batch is a part; None: of this batch.
        turn_ids: (batch, response_len), each sampled token's turn.
    Returns:
        shares of means over those tokens, which sum to the mean, for `read_mismatch`; and maxima, with turn_ids also
        the largest mean of a row over its first turn, and over its later ones. With top_k or top_p the engine's are
        those of the filtered distribution, so they differ from the trainer's even where both are right.
    """
    mask = response_mask.bool()
    difference = log_probs.exp().sub_(rollout_log_probs.exp()).abs_().masked_fill_(~mask, 0)
    tokens = max(int(mask.count_nonzero()) if batch_num_tokens is None else batch_num_tokens, 1)
    log_ratio = (log_probs - rollout_log_probs)[mask].clamp_(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = log_ratio.exp()
    shares = {
        "training/rollout_probs_diff_mean": difference.sum() / tokens,
        "training/rollout_kl": (rollout_log_probs - log_probs).masked_fill_(~mask, 0).sum()
        / tokens,
        "training/rollout_k3": (ratio - 1 - log_ratio).sum() / tokens,
        "training/rollout_ratio_mean": ratio.sum() / tokens,
        "training/rollout_ratio_square": ratio.square().sum() / tokens,
    }
    counts = torch.bucketize(log_ratio, log_ratio.new_tensor(EDGES)).bincount(
        minlength=len(EDGES) + 1
    )
    shares |= {f"{BIN}{number:02d}": count / tokens for number, count in enumerate(counts)}
    maxima = {"training/rollout_probs_diff_max": difference.max()}
    turns = (
        {}
        if turn_ids is None
        else {"first": mask & (turn_ids == 0), "later": mask & (turn_ids > 0)}
    )
    for name, chosen in turns.items():
        means = (difference * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
        maxima[f"training/rollout_turn_diff_max/{name}"] = means.max()
    return shares, maxima


def read_mismatch(metrics: Mapping[str, float]) -> Metrics:
    """Turns the summed shares of `measure_mismatch` into metrics; what is not its own stays as it is.

    Adds the effective sample size, (mean r)^2 / mean r^2, and the 1st, 50th and 99th percentile of r, the upper end of
    the histogram's bin (EDGES) that it lies in.
    """
    rest = {name: value for name, value in metrics.items() if not name.startswith(BIN)}
    if len(rest) == len(metrics):
        return rest
    square = rest.pop("training/rollout_ratio_square")
    rest["training/rollout_ess"] = rest["training/rollout_ratio_mean"] ** 2 / max(square, 1e-8)
    below = torch.tensor(
        [metrics[f"{BIN}{number:02d}"] for number in range(len(EDGES) + 1)]
    ).cumsum(0)
    for percent in (1, 50, 99):
        place = int(torch.searchsorted(below, percent / 100))
        edge = math.exp(([*EDGES, SAFETY_BOUND])[min(place, len(EDGES))])
        rest[f"training/rollout_ratio_p{percent:02d}"] = edge if below[-1] else 0.0
    return rest


def apply_correction(batch: DataProto, correction: RolloutCorrectionConfig) -> Metrics:
    """Weighs and rejects the batch's tokens as `algorithm.rollout_correction` says, in place; returns metrics."""
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    weights, batch.batch["response_mask"], metrics = correct_as(
        correction, *(batch.batch[name] for name in names)
    )
    if weights is not None:
        batch.batch["rollout_is_weights"] = weights.batch["rollout_is_weights"]
    return metrics
