"""Intervals of statistics that follow from sums over groups, by a studentised bootstrap.

Turns of a task share its luck and its difficulty, so that whole groups are drawn, with replacement.
A resample's statistic is compared with its own standard error, which each group's influence gives:

    t      = (resample - statistic) / error of the resample
    95 %   = statistic - error * (97.5 %, 2.5 % of t)          (Efron and Tibshirani 1993, ch. 12)

Plain percentiles of the resamples cover too little where groups are few. Invariant: equal seeds
give equal intervals; what cannot be bounded is bounded by infinity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

RESAMPLES = 2000
# Entries of (resamples, groups, statistics) that are held at once.
BLOCK_ENTRIES = 1 << 22
LEAST_GROUPS = 3


@dataclass(frozen=True)
class Interval:
    """Holds a statistic with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        """Checks whether a value is in the interval."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        """Writes it with two decimals: "0.92 [0.88, 0.95]"."""
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def with_digits(self) -> str:
        """Writes it with three digits each, however small it is: "0.00123 [0.001, 0.00151]"."""
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


class SummedStatistics(Protocol):
    """Describes statistics that follow from sums over groups."""

    def values(self, totals: np.ndarray) -> np.ndarray:
        """Computes the statistics: (..., columns) -> (..., statistics)."""

    def influences(self, totals: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Says how much a statistic rises with the weight of each group.

        Args:
            totals: (resamples, columns).
            sums: (groups, columns).
        Returns:
            (resamples, groups, statistics), the derivative by the group's weight.
        """


def intervals(
    statistics: SummedStatistics, sums: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES
) -> list[Interval]:
    """Computes each statistic with its 95 % interval.

    Args:
        sums: (groups, columns) of each group.
        seed: of the resamples.
    Raises:
        ValueError: there are fewer than three groups.
    """
    groups = len(sums)
    if groups < LEAST_GROUPS:
        raise ValueError(
            f"{groups} groups are too few for an interval, which draws whole groups: give "
            f"{LEAST_GROUPS} or more; 30 are few"
        )
    everyone = np.ones((1, groups))
    (value,), (error,) = _with_errors(statistics, sums, everyone)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(groups, np.full(groups, 1 / groups), size=resamples)
    ratios = []
    block = max(1, BLOCK_ENTRIES // (groups * len(value)))
    for start in range(0, resamples, block):
        drawn = weights[start : start + block].astype(np.float64)
        ratios.append(_ratios(*_with_errors(statistics, sums, drawn), value))
    lowest, highest = _tails(np.concatenate(ratios))
    return [_interval(*numbers) for numbers in zip(value, error, lowest, highest, strict=True)]


def _with_errors(
    statistics: SummedStatistics, sums: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Computes statistics and their standard errors where groups have weights.

    Args:
        weights: (resamples, groups).
    Returns:
        (resamples, statistics) each.
    """
    groups = len(sums)
    totals = weights @ sums
    influences = statistics.influences(totals, sums)
    variance = np.einsum("rg,rgs->rs", weights, influences**2) * groups / (groups - 1)
    return statistics.values(totals), np.sqrt(variance)


def _ratios(values: np.ndarray, errors: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Computes t of each resample: (resamples, statistics), infinite where it has no error."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (values - value) / errors
    return np.where(np.isnan(ratios), np.where(values == value, 0.0, np.inf), ratios)


def _tails(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns what 2.5 % of the resamples are below, and above: (statistics,) each."""
    ordered = np.sort(ratios, axis=0)
    outside = int(0.025 * len(ordered))
    return ordered[outside], ordered[-1 - outside]


def _interval(value: float, error: float, lowest: float, highest: float) -> Interval:
    """Turns the tails of t into an interval; of an error that is no number it is unbounded."""
    if not np.isfinite(value) or not np.isfinite(error):
        return Interval(float(value), -np.inf, np.inf)
    if error == 0:
        return Interval(float(value), float(value), float(value))
    return Interval(float(value), float(value - error * highest), float(value - error * lowest))
