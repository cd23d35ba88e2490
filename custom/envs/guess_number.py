"""The smallest game that needs several turns: guess a number, which is higher or lower."""

import random
import re
from dataclasses import dataclass
from typing import Any

from custom.env import BaseEnvironment, EnvironmentConfig


@dataclass
class GuessNumberConfig(EnvironmentConfig):
    """Holds the range, the number of guesses, and how they are rewarded.

    Attributes:
        high: the number is from 1 to this.
        turns: guesses in all.
        shaped: a miss earns up to 0.1 by its closeness; else only the right number is rewarded,
            with 1.
    """

    high: int = 10
    turns: int = 4
    shaped: bool = False


class GuessNumber(BaseEnvironment):
    """Takes `guess 5` or plain `5`; the first number of the answer counts."""

    config_cls = GuessNumberConfig
    config: GuessNumberConfig

    def reset(self, seed: int | None = None) -> str:
        """Draws the number and returns the rules."""
        self.number = random.Random(seed).randint(1, self.config.high)
        self.turns_left = self.config.turns
        return (
            f"I think of a number from 1 to {self.config.high}. You have {self.turns_left} guesses."
        )

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Answers higher, lower or correct; a text without a number costs its turn."""
        self.turns_left -= 1
        match = re.search(r"\d{1,9}", action)
        guess = int(match.group()) if match else None
        won = guess == self.number
        self._done = won or self.turns_left == 0
        return self._answer(guess), self._reward(guess), self._done, {"won": won}

    def _answer(self, guess: int | None) -> str:
        if guess == self.number:
            return "Correct!"
        if guess is None:
            hint = "I see no number."
        elif guess < self.number:
            hint = "Higher."
        else:
            hint = "Lower."
        if self._done:
            return f"{hint} It was {self.number}."
        return f"{hint} Guesses left: {self.turns_left}."

    def _reward(self, guess: int | None) -> float:
        if guess == self.number:
            return 1.0
        if guess is None or not self.config.shaped:
            return 0.0
        return 0.1 * max(0.0, 1 - abs(guess - self.number) / self.config.high)
