"""The metrics of an update, kept as tensors until its end.

Invariant: nothing is read before `MetricSums.read`, where one synchronisation reads all of it, over
all ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workers.ranks.process_groups import max_over_ranks, sum_over_ranks


class MetricSums:
    """Adds up metrics as detached tensors.

    What is added is this rank's share of a mean over all ranks' tokens: `read` sums the shares, and
    takes the largest maximum. Ranks of one sequence-parallel group add the same share, which counts
    once.
    """

    def __init__(self, sequence_ranks: int = 1) -> None:
        self.sequence_ranks = sequence_ranks
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Adds shares of means."""
        for name, value in metrics.items():
            share = torch.as_tensor(value).detach().float().mean() * weight
            if name in self._sums:
                share = self._sums[name] + share
            self._sums[name] = share

    def maximum(self, metrics: Mapping[str, Tensor]) -> None:
        """Takes maxima in."""
        for name, value in metrics.items():
            largest = torch.maximum(self._maxima.get(name, value), value)
            self._maxima[name] = largest.detach().float()

    def divide(self, divisor: float, others: Mapping[str, float]) -> None:
        """Divides every sum by `divisor`, those that `others` names by the number there."""
        self._sums = {name: value / others.get(name, divisor) for name, value in self._sums.items()}

    def all_finite(self) -> bool:
        """Checks whether every sum of this rank is finite; the host waits for it."""
        return bool(_stack(self._sums).isfinite().all())

    def read(self) -> dict[str, float]:
        """Returns all metrics, over all ranks; a collective."""
        sums = sum_over_ranks(_stack(self._sums)) / self.sequence_ranks
        maxima = max_over_ranks(_stack(self._maxima))
        metrics = dict(zip(self._sums, sums.tolist(), strict=True))
        metrics.update(zip(self._maxima, maxima.tolist(), strict=True))
        return metrics


def _stack(values: Mapping[str, Tensor]) -> Tensor:
    if not values:
        return torch.zeros(0)
    return torch.stack([value.cpu() for value in values.values()])
