"""Prints a step as one line of JSON, for what collects a program's standard output.

Invariant: the line is the object and nothing else, in one write; no key but `step` is added, and
numbers that are not finite are the strings "nan", "inf" and "-inf", as in metrics.jsonl.
"""

import json
import sys
from collections.abc import Mapping

from features.trackers.interface import Generations
from training.run.metrics_file import as_record


class JsonTracker:
    """Prints {"step": n, metric: value, …} a step."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Prints the step's object."""
        sys.stdout.write(json.dumps(as_record(data, step)) + "\n")
        sys.stdout.flush()

    def log_generations(self, rows: Generations, step: int) -> None:
        """Does nothing: a step is one object of numbers."""

    def close(self, *, failed: bool = False) -> None:
        """Ends nothing: standard output stays."""
