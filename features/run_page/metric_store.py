"""Holds a run's metrics over steps, a column a metric.

Invariant: a column's steps ascend and none comes twice; of a step that was logged twice, before
and after a resume, the later value counts.
"""

from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from training.run.metrics_file import read_records

# As the page holds them.
LARGEST_STEP = 2**31 - 1


class MetricStore:
    """Holds the metrics of a run's steps; a step is added as it is logged."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self.last_step = 0

    @classmethod
    def read(cls, path: Path) -> "MetricStore":
        """Reads a metrics.jsonl; one that is not there holds nothing."""
        store = cls()
        if path.is_file():
            for record in read_records(path):
                step = record.pop("step")
                store.add(step, record)
        return store

    def add(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Adds the metrics of a step; numbers that are not finite may be words ("nan").

        A step that no run can have reached is of a damaged line, and left out.
        """
        if not 0 <= step <= LARGEST_STEP:
            return
        self.last_step = max(self.last_step, step)
        for name, value in metrics.items():
            steps, values = self._columns.setdefault(name, (array("q"), array("d")))
            steps.append(step)
            values.append(as_float(value))

    @property
    def names(self) -> list[str]:
        """Lists the metrics, sorted."""
        return sorted(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns a metric's steps (N,) int64 and values (N,) float64; (0,) of an unknown one."""
        if name not in self._columns:
            return np.empty(0, dtype=np.int64), np.empty(0)
        steps = np.array(self._columns[name][0], dtype=np.int64)
        values = np.array(self._columns[name][1], dtype=np.float64)
        if len(steps) < 2 or bool((np.diff(steps) > 0).all()):
            return steps, values
        order = np.argsort(steps, kind="stable")
        steps = steps[order]
        values = values[order]
        is_last_of_step = np.append(np.diff(steps) > 0, True)
        return steps[is_last_of_step], values[is_last_of_step]

    def latest(self, name: str) -> float | None:
        """Returns a metric's value in the last step that has it; None where it is not finite."""
        steps, values = self.column(name)
        if not len(steps) or not np.isfinite(values[-1]):
            return None
        return float(values[-1])

    def values_at(self, name: str, steps: list[int]) -> list[float | None]:
        """Returns a metric's values in some steps; None where there is none, or no finite one."""
        own_steps, values = self.column(name)
        by_step = dict(zip(own_steps.tolist(), values.tolist(), strict=True))
        found = [by_step.get(step, np.nan) for step in steps]
        return [value if np.isfinite(value) else None for value in found]


def as_float(value: float | str) -> float:
    """Makes a float; infinite of an integer that is larger than any."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")
