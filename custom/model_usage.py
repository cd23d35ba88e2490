"""Counts the questions to models in this process, until somebody takes them to a step's metrics.

    process of an environment   USAGE.take() -> StepReply.usage -> the episode's facts
    driver                      USAGE.add(those), and its own -> metrics of the step

Invariant: nothing is counted twice; what is counted between two takes is in the second.
"""

import math
import threading
from collections.abc import Mapping
from typing import Any, TypeAlias

# By model, by what is counted.
Counts: TypeAlias = dict[str, dict[str, float]]

# calls               questions that were sent; one with its retries is one
# cached              questions that a cache answered
# failures            questions without an answer
# retries             further tries
# prompt_tokens, completion_tokens   as the server counted
# seconds             from a call's turn to its end
# cost                by the prices of the settings
COUNTED = (
    "calls",
    "cached",
    "failures",
    "retries",
    "prompt_tokens",
    "completion_tokens",
    "seconds",
    "cost",
)


class Usage:
    """Adds up counts; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counts = {}

    def add(self, counts: Mapping[str, Mapping[str, float]]) -> None:
        """Adds counts by model."""
        if not counts:
            return
        with self._lock:
            add_counts(self._counts, counts)

    def take(self) -> Counts:
        """Returns what was counted since the last take."""
        if not self._counts:
            return {}
        with self._lock:
            counts = self._counts
            self._counts = {}
        return counts


USAGE = Usage()


def add_counts(total: Counts, more: Mapping[str, Mapping[str, float]]) -> None:
    """Adds counts to a total, in place."""
    for name, counts in more.items():
        own = total.setdefault(name, {})
        for key, value in counts.items():
            own[key] = own.get(key, 0.0) + value


def checked_counts(counts: Any) -> Counts:
    """Takes from what another process sent the counts that are well formed."""
    checked: Counts = {}
    if not isinstance(counts, Mapping):
        return checked
    for name, values in counts.items():
        numbers = {
            key: float(values[key])
            for key in COUNTED
            if isinstance(values.get(key), int | float) and math.isfinite(values[key])
        }
        if numbers:
            checked[name] = numbers
    return checked
