"""How far the log-probs of rollout engine and trainer are apart, which both compute of the same tokens.

Invariant: it measures and corrects nothing; masked tokens do not count.
"""

from __future__ import annotations

from torch import Tensor


def compute_offpolicy_metrics(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    batch_num_tokens: int | None = None,
    turn_ids: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measures how far the engine's probabilities of its own samples are from the trainer's.

    Args:
        log_probs, rollout_log_probs: (batch, response_len), nats.
        batch_num_tokens: tokens of the whole of which this batch is a part; None: of this batch.
        turn_ids: (batch, response_len), each sampled token's turn.
    Returns:
        shares of means over those tokens (they sum to the mean), `rollout_kl` in nats per token; and maxima, with
        turn_ids also the largest mean of a row over its first turn, and over its later ones. With
        top_k or top_p the engine's are those of the filtered distribution, so they differ from the trainer's even where
        both are right.
    """
    mask = response_mask.bool()
    difference = log_probs.exp().sub_(rollout_log_probs.exp()).abs_().masked_fill_(~mask, 0)
    tokens = max(int(mask.count_nonzero()) if batch_num_tokens is None else batch_num_tokens, 1)
    shares = {
        "training/rollout_probs_diff_mean": difference.sum() / tokens,
        "training/rollout_kl": (rollout_log_probs - log_probs).masked_fill_(~mask, 0).sum() / tokens,
    }
    maxima = {"training/rollout_probs_diff_max": difference.max()}
    turns = {} if turn_ids is None else {"first": mask & (turn_ids == 0), "later": mask & (turn_ids > 0)}
    for name, chosen in turns.items():
        means = (difference * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
        maxima[f"training/rollout_turn_diff_max/{name}"] = means.max()
    return shares, maxima
