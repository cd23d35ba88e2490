"""How far trainer and engine are apart in the log-probs of a whole batch, as metrics.

r is the ratio pi_trainer / pi_engine of a token.

Invariant: the function is pure; masked tokens do not count, and of a batch without any token the
metrics are zero.
"""

import torch
from torch import Tensor

from data.array_ops import row_blocks
from training.core_algos.masked_ops import at_least_float32, masked_mean, masked_range

Metrics = dict[str, float]
# Bound of a log-ratio before its exponential.
SAFETY_BOUND = 20.0


@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Metrics:
    """Measures how far trainer and engine are apart.

    Args:
        old_log_prob, rollout_log_prob, response_mask: (batch, response_len); the trainer's and the
            engine's, nats.
    Returns: perplexities of both (means over rows; of log_ppl_diff, the logarithm of their ratio,
        the extremes too), kl and k3_kl (engine against trainer, nats per token), chi2_token (mean
        r^2 - 1) and chi2_seq (of the rows' products).
    """
    sums = _row_sums(old_log_prob, rollout_log_prob, response_mask)
    lengths, training, rollout, k3, chi2 = sums  # (batch,) each
    tokens = lengths.sum().clamp(min=1)
    log_ratio = training - rollout  # of each row's product
    bounded_log_ratio = log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)
    training_log_ppl = -training / lengths.clamp(min=1)
    rollout_log_ppl = -rollout / lengths.clamp(min=1)
    log_ppl_difference = training_log_ppl - rollout_log_ppl

    metrics = {
        "kl": -log_ratio.sum() / tokens,
        "k3_kl": k3.sum() / tokens,
        "chi2_token": chi2.sum() / tokens,
    }
    per_row = {
        "log_ppl_diff": log_ppl_difference,
        "log_ppl_abs_diff": log_ppl_difference.abs(),
        "ppl_ratio": log_ppl_difference.exp(),
        "chi2_seq": (2 * bounded_log_ratio).expm1(),
        "training_ppl": training_log_ppl.exp(),
        "training_log_ppl": training_log_ppl,
        "rollout_ppl": rollout_log_ppl.exp(),
        "rollout_log_ppl": rollout_log_ppl,
    }
    for name, values in per_row.items():
        metrics[name] = masked_mean(values, lengths > 0)
    lowest, highest = masked_range(log_ppl_difference, lengths > 0)
    metrics["log_ppl_diff_min"] = lowest
    metrics["log_ppl_diff_max"] = highest
    return {name: value.item() for name, value in metrics.items()}


def _row_sums(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor) -> Tensor:
    """Sums over each row's sampled tokens what the metrics are made of: (5, batch) float64.

    They are tokens, log-probs of the trainer and of the engine, r - 1 - log r, and r^2 - 1.
    """
    mask = response_mask.bool()
    sums = []
    # In blocks, so that there are no float32 copies of the whole batch.
    for rows in row_blocks(mask):
        training, rollout = at_least_float32(old_log_prob[rows], rollout_log_prob[rows])
        training = torch.where(mask[rows], training, 0)
        rollout = torch.where(mask[rows], rollout, 0)
        log_ratio = (training - rollout).clamp(-SAFETY_BOUND, SAFETY_BOUND)
        per_token = (
            mask[rows].to(log_ratio.dtype),
            training,
            rollout,
            log_ratio.expm1() - log_ratio,
            (2 * log_ratio).expm1(),
        )
        sums.append(torch.stack([tensor.sum(-1, dtype=torch.float64) for tensor in per_token]))
    return torch.cat(sums, dim=1)
