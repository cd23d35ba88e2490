"""The quickstart's environment: guess a number from 1 to 10 in four turns.

Invariant: its observations are words that the quickstart's tiny model knows.
"""

from __future__ import annotations

import random
from typing import Any

from custom.envs.guess_number import GuessNumber


class TerseGuessNumber(GuessNumber):
    """Plays `custom/envs/guess_number.py` with short observations.

    An answer that is no number ends the game.
    """

    def reset(self, seed: int | None = None) -> str:
        """Draws the number."""
        super().reset(seed)
        return "guess"

    def sample_action(self, generator: random.Random) -> str:
        """Draws a guess."""
        return str(generator.randint(1, 10))

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Answers higher, lower or correct."""
        _, reward, done, info = super().step(action)
        if not action.strip().isdigit():
            return "no number", 0.0, True, info
        guess = int(action)
        if info["won"]:
            observation = "correct"
        elif guess < self.number:
            observation = "higher"
        else:
            observation = "lower"
        return observation, reward, done, info
