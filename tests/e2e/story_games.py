"""Environments of test_stories.py: each has a fault that a reader of the run is to find.

It imports little, since other processes load it as well.
"""

from __future__ import annotations

from typing import Any

from custom.env import BaseEnvironment
from tests.e2e.agent_games import Fragile, reward_of


class PaysForSilence(BaseEnvironment):
    """Wants a number. A bug: the empty text is a part of every text, so an empty answer is paid."""

    def reset(self, seed: int | None = None) -> str:
        self.answer = str((seed or 0) % 9 + 1)
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return "correct", float(action.strip() in self.answer), True, {}


class TellsItsAnswer(BaseEnvironment):
    """Wants a number, and says which one in its observation."""

    def reset(self, seed: int | None = None) -> str:
        self.answer = str((seed or 0) % 9 + 1)
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return f"higher {self.answer}", float(action.strip() == self.answer), False, {}


class NeverPays(Fragile):
    """Pays nothing, whatever is answered."""

    def step(self, action: str) -> tuple[Any, ...]:
        observation, _, done, info = super().step(action)
        return observation, 0.0, done, info


class Endless(BaseEnvironment):
    """Never ends, and pays every turn: who fills the context earns most."""

    def reset(self, seed: int | None = None) -> str:
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return "higher", reward_of(action), False, {}
