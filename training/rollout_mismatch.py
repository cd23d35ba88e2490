"""How far engine and trainer are apart in the log-probs of the same tokens, as metrics.

`measure_mismatch` measures parts of a batch, whose shares are summed over micro-batches and ranks,
and `read_mismatch` turns the sums into metrics; `compute_offpolicy_metrics`
(core_algos/offpolicy_metrics.py) measures a whole batch at once. r is the ratio
pi_trainer / pi_engine of a token.

Invariant: every function is pure; masked tokens do not count, and of a batch without any token the
metrics are zero.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from training.core_algos.offpolicy_metrics import SAFETY_BOUND, Metrics
from training.core_algos.offpolicy_metrics import (
    compute_offpolicy_metrics as compute_offpolicy_metrics,
)

# Edges of a histogram of log-ratios, which percentiles are read off.
_DISTANCES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
EDGES = (*(-distance for distance in reversed(_DISTANCES)), *_DISTANCES)
# Prefix of the histogram's bins among the metrics.
BIN = "training/rollout_ratio_bin/"


def measure_mismatch(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    batch_num_tokens: int | None = None,
    turn_ids: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measures how far the engine's probabilities of its samples are from the trainer's, in parts.

    Args:
        log_probs, rollout_log_probs, response_mask: (batch, response_len), nats.
        batch_num_tokens: tokens of the whole of which this batch is a part; None: of this batch.
        turn_ids: (batch, response_len), each sampled token's turn.
    Returns:
        shares of means over those tokens, which sum to the mean, for `read_mismatch`; and maxima,
        with turn_ids also the largest mean of a row over its first turn, and over its later ones;
        0-dim each. With top_k or top_p the engine's probabilities are those of the filtered
        distribution, so they differ from the trainer's even where both are right.
    """
    mask = response_mask.bool()
    # In place, as this is as large as the batch.
    difference = log_probs.exp().sub_(rollout_log_probs.exp()).abs_()
    difference.masked_fill_(~mask, 0)
    if batch_num_tokens is None:
        batch_num_tokens = int(mask.count_nonzero())
    tokens = max(batch_num_tokens, 1)
    kl = (rollout_log_probs - log_probs).masked_fill_(~mask, 0).sum() / tokens
    # Only the sampled tokens count; they stand in one line.
    log_ratio = (log_probs - rollout_log_probs)[mask].clamp_(-SAFETY_BOUND, SAFETY_BOUND)
    ratio = log_ratio.exp()
    shares = {
        "training/rollout_probs_diff_mean": difference.sum() / tokens,
        "training/rollout_kl": kl,
        "training/rollout_k3": (ratio - 1 - log_ratio).sum() / tokens,
        "training/rollout_ratio_mean": ratio.sum() / tokens,
        "training/rollout_ratio_square": ratio.square().sum() / tokens,
    }
    bins = torch.bucketize(log_ratio, log_ratio.new_tensor(EDGES))
    for number, count in enumerate(bins.bincount(minlength=len(EDGES) + 1)):
        shares[_bin_name(number)] = count / tokens

    maxima = {"training/rollout_probs_diff_max": difference.max()}
    if turn_ids is not None:
        first = _largest_row_mean(difference, mask & (turn_ids == 0))
        later = _largest_row_mean(difference, mask & (turn_ids > 0))
        maxima["training/rollout_turn_diff_max/first"] = first
        maxima["training/rollout_turn_diff_max/later"] = later
    return shares, maxima


def _largest_row_mean(per_token: Tensor, chosen: Tensor) -> Tensor:
    """Averages each row over its chosen tokens, and takes the largest of the means: 0-dim."""
    means = (per_token * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
    return means.max()


def _bin_name(number: int) -> str:
    return f"{BIN}{number:02d}"


def read_mismatch(metrics: Mapping[str, float]) -> Metrics:
    """Turns the summed shares of `measure_mismatch` into metrics; all others stay as they are.

    Adds the effective sample size, (mean r)^2 / mean r^2, and the 1st, 50th and 99th percentile of
    r, the upper end of the histogram's bin (EDGES) that it lies in; 0 where there was no token.
    """
    read = {name: value for name, value in metrics.items() if not name.startswith(BIN)}
    has_histogram = len(read) < len(metrics)
    if not has_histogram:
        return read
    mean_square = read.pop("training/rollout_ratio_square")
    read["training/rollout_ess"] = read["training/rollout_ratio_mean"] ** 2 / max(mean_square, 1e-8)

    shares = [metrics[_bin_name(number)] for number in range(len(EDGES) + 1)]
    share_up_to = torch.tensor(shares).cumsum(0)
    # The last bin has no upper edge.
    upper_ends = [*EDGES, SAFETY_BOUND]
    for percent in (1, 50, 99):
        place = int(torch.searchsorted(share_up_to, percent / 100))
        percentile = math.exp(upper_ends[min(place, len(EDGES))])
        if not share_up_to[-1]:
            percentile = 0.0
        read[f"training/rollout_ratio_p{percent:02d}"] = percentile
    return read
