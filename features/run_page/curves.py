"""Thins curves out and writes them as a page's script reads them.

A curve of more than MOST_POINTS steps is cut into as many parts, and each part keeps its mean, its
smallest and its largest value: a spike of one step in 5,000 stays to be seen. With very many curves
each has fewer points, so that a page stays small. Numbers are written as little-endian float32
(int32 for steps) in base64.

Invariant: where a curve was not thinned out, every step stands on the page with its own value.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_POINTS = 600
FEWEST_POINTS = 60
# The most points of all curves of a page together, about 8 MB.
POINTS_OF_A_PAGE = 500_000


@dataclass(frozen=True)
class Curve:
    """Holds a metric over steps, or its mean over several runs.

    Attributes:
        first, last: (P,) int64, the steps that a point stands for.
        mean: (P,) float64, NaN where there is no finite value.
        low, high: (P,) float64, the smallest and largest value behind a point; None: each point is
            one value of one run.
        runs: (P,) int64, how many runs a point is of; None: of all.
        not_finite: how many steps have a value that is not finite.
    """

    first: np.ndarray
    last: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None
    runs: np.ndarray | None = None
    not_finite: int = 0


def points_for(curves: int) -> int:
    """Returns how many points each of so many curves has on a page, at most."""
    return max(FEWEST_POINTS, min(MOST_POINTS, POINTS_OF_A_PAGE // max(curves, 1)))


def curve_of(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> Curve:
    """Makes the curve of one run, thinned out where it is long."""
    is_finite = np.isfinite(values)
    finite = np.where(is_finite, values, np.nan)
    curve = Curve(first=steps, last=steps, mean=finite, not_finite=int((~is_finite).sum()))
    return thin(curve, most)


def mean_of_runs(
    columns: Iterable[tuple[np.ndarray, np.ndarray]], most: int = MOST_POINTS
) -> Curve:
    """Makes the mean of several runs' curves, with the smallest and the largest of each step."""
    columns = list(columns)
    steps = np.unique(np.concatenate([steps for steps, _ in columns]))
    table = np.full((len(columns), len(steps)), np.nan)
    not_finite = 0
    for run, (own_steps, values) in enumerate(columns):
        is_finite = np.isfinite(values)
        not_finite += int((~is_finite).sum())
        places = np.searchsorted(steps, own_steps)
        table[run, places] = np.where(is_finite, values, np.nan)
    counts = np.isfinite(table).sum(axis=0)
    sums = np.nansum(table, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    varies = bool((counts < len(columns)).any())
    curve = Curve(
        first=steps,
        last=steps,
        mean=mean,
        low=np.fmin.reduce(table, axis=0),
        high=np.fmax.reduce(table, axis=0),
        runs=counts if varies else None,
        not_finite=not_finite,
    )
    return thin(curve, most)


def thin(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Cuts a curve of more than `most` points into so many parts: mean, smallest, largest."""
    size = len(curve.mean)
    if size <= most:
        return curve
    edges = np.linspace(0, size, most + 1).astype(np.int64)
    begins = edges[:-1]
    ends = edges[1:] - 1
    is_finite = np.isfinite(curve.mean)
    sums = np.add.reduceat(np.where(is_finite, curve.mean, 0.0), begins)
    counts = np.add.reduceat(is_finite.astype(np.int64), begins)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = sums / counts
    low = curve.mean if curve.low is None else curve.low
    high = curve.mean if curve.high is None else curve.high
    runs = None if curve.runs is None else np.minimum.reduceat(curve.runs, begins)
    return Curve(
        first=curve.first[begins],
        last=curve.last[ends],
        mean=mean,
        low=np.fmin.reduceat(low, begins),
        high=np.fmax.reduceat(high, begins),
        runs=runs,
        not_finite=curve.not_finite,
    )


class CurveWriter:
    """Writes curves; those with the same steps share them.

    Attributes:
        tables: the steps of curves, as the page's script reads them.
    """

    def __init__(self) -> None:
        self.tables: list[dict[str, Any]] = []
        self._numbers: dict[bytes, int] = {}

    def write(self, curve: Curve) -> dict[str, Any]:
        """Returns what the page holds of a curve."""
        key = curve.first.tobytes() + curve.last.tobytes()
        if key not in self._numbers:
            self._numbers[key] = len(self.tables)
            table = {"first": in_base64(curve.first, "<i4"), "last": None}
            if not np.array_equal(curve.first, curve.last):
                table["last"] = in_base64(curve.last, "<i4")
            self.tables.append(table)
        written: dict[str, Any] = {
            "table": self._numbers[key],
            "mean": in_base64(curve.mean, "<f4"),
        }
        if curve.low is not None and curve.high is not None:
            written["low"] = in_base64(curve.low, "<f4")
            written["high"] = in_base64(curve.high, "<f4")
        if curve.runs is not None:
            written["runs"] = in_base64(curve.runs, "<i4")
        if curve.not_finite:
            written["notFinite"] = curve.not_finite
        return written


def in_base64(numbers: np.ndarray, dtype: str) -> str:
    """Writes numbers in base64; what is too large for a float32 becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return base64.b64encode(numbers.astype(dtype).tobytes()).decode("ascii")
