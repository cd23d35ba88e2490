"""Sums too long to do in one's head.

They are made for the calculator tool (`agent.tools`), without which few are solved.
"""

import random
from dataclasses import dataclass
from typing import Any

from custom.env import BaseEnvironment, EnvironmentConfig
from custom.reward_score import last_number


@dataclass
class ToolArithmeticConfig(EnvironmentConfig):
    """Holds how hard it is (the largest number), and how often one may try."""

    largest: int = 9999
    attempts: int = 1


class ToolArithmetic(BaseEnvironment):
    """Asks for the value of `a * b + c`; the answer's last number counts, 1 if it is right."""

    config_cls = ToolArithmeticConfig
    config: ToolArithmeticConfig

    def reset(self, seed: int | None = None) -> str:
        """Draws the numbers and returns the question."""
        draw = random.Random(seed)
        a, b, c = (draw.randint(2, self.config.largest) for _ in range(3))
        self.answer = str(a * b + c)
        self.attempts_left = self.config.attempts
        return f"What is {a} * {b} + {c}?"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Answers right or wrong; the last attempt ends the episode."""
        self.attempts_left -= 1
        is_right = last_number(action) == self.answer
        self._done = is_right or self.attempts_left == 0
        if is_right:
            return "Correct.", 1.0, self._done, {}
        return "That is not right.", 0.0, self._done, {}

    def get_prompt_prefix(self) -> str:
        """Returns the system prompt."""
        return "Use the calculator, then give the result as a number."
