"""Defines a tracker: it takes a step's numbers, validation's answers, its end."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

# Rows of validation: mappings with `input` and `output` (text) and `score` (a number).
Generations = Sequence[Mapping[str, Any]]
# The columns of a table of generations, in this order.
GENERATION_COLUMNS = ("step", "input", "output", "score")
# A tracker that has a name for each table calls it so.
GENERATIONS_NAME = "val/generations"


class Tracker(Protocol):
    """Takes a step's metrics to one destination."""

    def log(self, data: Mapping[str, float], step: int) -> None:
        """Records one step."""

    def log_generations(self, rows: Generations, step: int) -> None:
        """Records some of validation's answers."""

    def close(self, *, failed: bool = False) -> None:
        """Ends the record; `failed`: the run ended by an error, or was interrupted."""


def as_table(rows: Generations, step: int) -> list[list[Any]]:
    """Returns the rows in the columns of a table of generations."""
    return [[step, row["input"], row["output"], row["score"]] for row in rows]
