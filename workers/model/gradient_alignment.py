"""Whether a step's first gradient goes where the advantages point.

Before the first update the policy is the one that sampled, so that every policy loss has the
gradient -A x (a weight that is not negative) in each token's log-prob. Its cosine with -A is 1
where the weights are equal, and negative where a sign is wrong. Invariant: the gradient is read and
never changed.
"""

from typing import Any

import torch
from torch import Tensor

PARTS = ("descent", "gradient_square", "advantage_square")


def watch_gradient(log_prob: Tensor, advantages: Tensor, metrics: dict[str, Any]) -> None:
    """Adds the parts of the cosine to the metrics, once the backward pass is through.

    Args:
        log_prob: with a gradient; advantages: (rows, response_len) each, zero where nothing was
            sampled.
    """

    def measure(gradient: Tensor) -> None:
        sums = alignment_sums(gradient.detach().float(), advantages.float())
        metrics.update({_part(name): value for name, value in zip(PARTS, sums, strict=True)})

    if log_prob.requires_grad:
        log_prob.register_hook(measure)


def alignment_sums(gradient: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums what the cosine is made of: 0-dim each."""
    descent = -(gradient * advantages).sum()
    return descent, gradient.square().sum(), advantages.square().sum()


def read_alignment(metrics: dict[str, float]) -> dict[str, float]:
    """Makes actor/gradient_alignment, the cosine, of the summed parts; other metrics stay."""
    if _part(PARTS[0]) not in metrics:
        return metrics
    descent, gradient_square, advantage_square = (metrics.pop(_part(name)) for name in PARTS)
    length = (gradient_square * advantage_square) ** 0.5
    if length > torch.finfo(torch.float32).tiny:
        metrics["actor/gradient_alignment"] = descent / length
    return metrics


def _part(name: str) -> str:
    return f"actor/gradient_alignment/{name}"
