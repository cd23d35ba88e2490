"""Keeps the metrics of the last steps, with which a step's are compared."""

from collections import deque
from collections.abc import Mapping

Metrics = Mapping[str, float]
# Steps that are remembered.
MEMORY = 20


class History:
    """Holds the metrics of the last steps, the latest last."""

    def __init__(self) -> None:
        self._steps: deque[Metrics] = deque(maxlen=MEMORY)

    def add(self, metrics: Metrics) -> None:
        """Adds a step."""
        self._steps.append(metrics)

    def values(self, name: str) -> list[float]:
        """Lists a metric's values in the steps that have it."""
        return [metrics[name] for metrics in self._steps if name in metrics]
