"""Environments of test_stories.py: each has a fault that a reader of the run is to find.

It imports little, since other processes load it as well.
"""

from __future__ import annotations

import time
from typing import Any

from custom.env import BaseEnvironment
from tests.e2e.agent_games import Steady, reward_of


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


class NeverPays(Steady):
    """Pays nothing, whatever is answered."""

    def step(self, action: str) -> tuple[Any, ...]:
        observation, _, done, info = super().step(action)
        return observation, 0.0, done, info


class BrokenTool(Steady):
    """Calls a tool for every answer, which fails whenever it is called."""

    def step(self, action: str) -> tuple[Any, ...]:
        observation, reward, done, info = super().step(action)
        call = {"name": "look_up", "ok": False, "error_kind": "exception", "seconds": 0.0}
        return observation, reward, done, {**info, "tool_calls": [call]}


class Endless(BaseEnvironment):
    """Goes on as long as numbers are answered, and pays little for each."""

    def reset(self, seed: int | None = None) -> str:
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return "higher", 0.1 * reward_of(action), not action.strip().isdigit(), {}


class SlowSeeds(Steady):
    """Takes three seconds for the first answer to one task in eight."""

    def reset(self, seed: int | None = None) -> str:
        self.is_slow = (seed or 0) % 8 == 0
        return super().reset(seed)

    def step(self, action: str) -> tuple[Any, ...]:
        if self.is_slow:
            time.sleep(3)
            self.is_slow = False
        return super().step(action)


class Wordy(Steady):
    """Answers at length, with what is asked for in the middle."""

    def step(self, action: str) -> tuple[Any, ...]:
        _, reward, done, info = super().step(action)
        return f"{'higher ' * 8}the number is 3 {'lower ' * 8}", reward, done, info


class OwnCalls(Steady):
    """Calls a tool of its own, and says of it no more than its name and that it failed."""

    def step(self, action: str) -> tuple[Any, ...]:
        observation, reward, done, info = super().step(action)
        calls = [{"name": "lookup"}, {"name": "database", "ok": False}]
        return observation, reward, done, {**info, "tool_calls": calls}


class NamedTasks(Steady):
    """Names its tasks by rooms; in the cellar nothing is ever paid."""

    ROOMS = ("hall", "attic", "cellar", "garden")

    def reset(self, seed: int | None = None) -> str:
        self.room = self.ROOMS[(seed or 0) % 4]
        return super().reset(seed)

    def step(self, action: str) -> tuple[Any, ...]:
        observation, reward, done, info = super().step(action)
        paid = 0.0 if self.room == "cellar" else reward
        return observation, paid, done, {**info, "task": self.room}


class Solved(BaseEnvironment):
    """Pays 1 for whatever is answered."""

    def reset(self, seed: int | None = None) -> str:
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return "correct", 1.0, True, {}
