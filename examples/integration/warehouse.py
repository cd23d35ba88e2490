"""A project's own parts: dataset, environment, tool and reward function.

The agent is asked how much of an item is left; it may look that up (`Action: stock[apples]`), and
answers a number.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from custom.env import BaseEnvironment, Trajectory
from custom.tools import Tool, ToolDefinition, ToolError

TABLE = Path(__file__).with_name("warehouse.csv")


def read_table(path: str | Path) -> list[dict[str, str]]:
    """Reads rows of `item` and `left`."""
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


class Questions(Dataset):
    """Holds the tasks, a row of the table each; the trainer builds it with these four arguments."""

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None) -> None:
        self.rows: list[dict[str, str]] = []
        for file in data_files:
            self.rows.extend(read_table(file))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, str]:
        return self.rows[index]


class Warehouse(BaseEnvironment):
    """Asks for an item's number.

    Any text without a tool call is the answer, and ends the episode.
    """

    def reset(self, seed: int | None = None, item: str = "apples", left: str = "7") -> str:
        """Asks for a row's item; the row's columns come by name."""
        self.left = left
        return f"how many {item}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Answers right or wrong."""
        is_right = action.strip() == self.left
        if is_right:
            return "right", 1.0, True, {"right": True}
        return "wrong", 0.0, True, {"right": False}

    def sample_action(self, generator: random.Random) -> str:
        """Draws an answer, for the trial before the run."""
        return str(generator.randint(0, 9))


class Stock(Tool):
    """Looks an item up."""

    definition = ToolDefinition(
        name="stock",
        description="Says how many of an item are left.",
        parameters={
            "type": "object",
            "properties": {"item": {"type": "string"}},
            "required": ["item"],
        },
        timeout_s=5,
    )

    def __init__(self) -> None:
        self.left = {row["item"]: row["left"] for row in read_table(TABLE)}

    def execute(self, item: str) -> str:
        """Returns the number; a ToolError is what the model is told."""
        if item.strip() not in self.left:
            raise ToolError("wrong")
        return self.left[item.strip()]


def looked_up(trajectory: Trajectory) -> float:
    """Pays 1 for a right answer that was looked up, 0.5 for a right guess, else 0."""
    if not trajectory.infos or not trajectory.infos[-1].get("right"):
        return 0.0
    for info in trajectory.infos:
        if any(call["ok"] for call in info.get("tool_calls", [])):
            return 1.0
    return 0.5
