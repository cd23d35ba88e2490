"""A game that is won with a tool alone: four names have numbers, and one of them is asked for.

The tool tells the number of a name; who answers without it guesses one of five.
Invariant: equal seeds give equal numbers and questions.
"""

from __future__ import annotations

import random
from typing import Any

from custom.env import BaseEnvironment
from custom.tools import Tool, ToolDefinition, ToolError

NAMES = ["ann", "bob", "eve", "joe"]
HIGHEST = 5


class Numbers(BaseEnvironment):
    """Asks for the number of a name; the answer is paid 1 where it is that number, else 0."""

    def reset(self, seed: int | None = None) -> str:
        """Draws a number for each name, and the name that is asked for."""
        draw = random.Random(seed)
        self.numbers = {name: draw.randint(1, HIGHEST) for name in NAMES}
        self.asked = draw.choice(NAMES)
        return f"What number has {self.asked}?"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Pays the answer, which ends the game."""
        is_right = action.strip() == str(self.numbers[self.asked])
        return "", float(is_right), True, {"number": action.strip().isdigit()}

    def sample_action(self, generator: random.Random) -> str:
        """Draws an answer."""
        return str(generator.randint(1, HIGHEST))


class LookUp(Tool):
    """Tells the number of a name in the game that is played."""

    definition = ToolDefinition(
        name="look_up",
        description="Tells the number of a name.",
        parameters={
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    )

    def execute(self, name: str) -> str:
        """Returns the number, in a sentence."""
        if name not in self.environment.numbers:
            raise ToolError("no such name")
        return f"{name} has {self.environment.numbers[name]}"
