"""Policy filtration: trains more often on responses whose reward is sure.

PF-PPO (arXiv:2409.06957). Invariant: the function is pure, and draws no row that is not drawable.
"""

import torch
from torch import Tensor

from data.names import registered


def draw_rows_by_score(
    scores: Tensor,
    drawable: Tensor,
    reweight_method: str = "pow",
    weight_pow: float = 2.0,
    seed: int | None = None,
) -> Tensor:
    """Draws as many rows as there are, with replacement, by their scores.

    Args:
        scores: (batch,) float64.
        drawable: (batch,) bool, the rows that may be drawn; one at least.
        reweight_method: pow: |score|^weight_pow; max_min: the best and the worst alone; max_random:
            the best four times as often as others.
        weight_pow: the power, of pow.
        seed: of the draws; None: torch's generator draws.
    Returns: (batch,) int64, the rows in the order in which they were drawn.
    Raises:
        ValueError: the method is unknown.
    """
    is_best = scores == scores[drawable].max()
    is_worst = scores == scores[drawable].min()
    weights_by_method = {
        "pow": scores.abs() ** weight_pow,
        "max_min": is_best | is_worst,
        "max_random": torch.where(is_best, 0.4, 0.1),
    }
    weights = registered(weights_by_method, "reweight_method", reweight_method)
    # A little above 0, so that there is always something to draw.
    weights = torch.where(drawable, weights.double() + 1e-8, 0)
    generator = None
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, len(scores), replacement=True, generator=generator)
