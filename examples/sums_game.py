"""A game that pays nothing until all is right: five sums in a row.

    add 3 and 6      the policy: 9
    add 0 and 5      5                   five sums; nothing says whether an answer was right
    …                …                   1 if all five were right, else 0

Five answers of thirteen numbers that happen to be right are one episode in some 100,000:
whoever does not know how to add is never paid. Invariant: equal seeds give equal sums.
"""

from __future__ import annotations

import random
from typing import Any

from custom.env import BaseEnvironment

HIGHEST = 6
SUMS = 5


class Sums(BaseEnvironment):
    """Asks five sums, and pays at the end."""

    max_turns = SUMS

    def reset(self, seed: int | None = None) -> str:
        """Draws the sums."""
        draw = random.Random(seed)
        self.sums = [(draw.randint(0, HIGHEST), draw.randint(0, HIGHEST)) for _ in range(SUMS)]
        self.answers: list[str] = []
        return self.asked

    @property
    def asked(self) -> str:
        """Returns the next sum, as the policy reads it."""
        first, second = self.sums[len(self.answers)]
        return f"add {first} and {second}"

    @property
    def answer(self) -> str:
        """Returns the right answer, for a player that follows a script."""
        return str(sum(self.sums[len(self.answers)]))

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Takes an answer; the last one ends the game."""
        self.answers.append(action.strip())
        if len(self.answers) < SUMS:
            return self.asked, 0.0, False, {}
        right = [str(sum(pair)) for pair in self.sums]
        is_won = self.answers == right
        return "", float(is_won), True, {"won": is_won}

    def sample_action(self, generator: random.Random) -> str:
        """Draws a number that a sum may be."""
        return str(generator.randint(0, 2 * HIGHEST))
