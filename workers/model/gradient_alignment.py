"""Whether a step's first gradient goes where the advantages, or the returns, point.

Before the first update the policy is the one that sampled, so that every policy loss has the
gradient -A x (a weight that is not negative) in each token's log-prob. Its cosine with -A is 1
where the weights are equal, and negative where a sign is wrong. So it is with a critic, whose
values go towards the returns. Invariant: the gradient is read and never changed.
"""

from typing import Any

import torch
from torch import Tensor

PARTS = ("descent", "gradient_square", "direction_square")
MODELS = ("actor", "critic")


def watch_gradient(
    output: Tensor, direction: Tensor, metrics: dict[str, Any], model: str = "actor"
) -> None:
    """Adds the parts of the cosine to the metrics, once the backward pass is through.

    Args:
        output: log-probs, or values, with a gradient; direction: advantages, or returns less
            values: (rows, response_len) each, zero where nothing was sampled.
    """

    def measure(gradient: Tensor) -> None:
        sums = alignment_sums(gradient.detach().float(), direction.float())
        metrics.update({_part(model, name): value for name, value in zip(PARTS, sums, strict=True)})

    if output.requires_grad:
        output.register_hook(measure)


def alignment_sums(gradient: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums what the cosine is made of: 0-dim each."""
    descent = -(gradient * direction).sum()
    return descent, gradient.square().sum(), direction.square().sum()


def read_alignment(metrics: dict[str, float]) -> dict[str, float]:
    """Makes MODEL/gradient_alignment, the cosine, of the summed parts; other metrics stay."""
    for model in MODELS:
        if _part(model, PARTS[0]) not in metrics:
            continue
        descent, gradient_square, direction_square = (
            metrics.pop(_part(model, name)) for name in PARTS
        )
        length = (gradient_square * direction_square) ** 0.5
        if length > torch.finfo(torch.float32).tiny:
            metrics[f"{model}/gradient_alignment"] = descent / length
    return metrics


def _part(model: str, name: str) -> str:
    return f"{model}/gradient_alignment/{name}"
