"""Environments, agents and rewards of test_agents.py.

It imports little, since other processes load it as well.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from custom.env import BaseEnvironment, EnvironmentConfig, Trajectory


def fate(seed: int) -> str:
    """What happens in an episode of `Fragile`.

    One in five crashes in its second step, one in five gives a reward that is no number.
    """
    return ("fine", "fine", "fine", "crash", "garbage")[seed % 5]


class Fragile(BaseEnvironment):
    """Pays 1 for an even number in each of two turns; some seeds bring trouble in the second."""

    def reset(self, seed: int | None = None) -> str:
        self.fate, self.turn = fate(seed or 0), 0
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        self.turn += 1
        if self.turn == 2 and self.fate == "crash":
            raise RuntimeError("out of order")
        garbage = self.turn == 2 and self.fate == "garbage"
        return (
            "higher",
            float("nan") if garbage else reward_of(action),
            self.turn == 2,
            {"turn": self.turn},
        )


def reward_of(action: str) -> float:
    """1 for an even number, 0 for an odd one, 0.25 for no number."""
    word = action.strip()
    return 0.25 if not word.isdigit() else float(int(word) % 2 == 0)


class Doomed(BaseEnvironment):
    """Every step fails; its first reset does not."""

    def reset(self, seed: int | None = None) -> str:
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        raise RuntimeError("never")


class DoomedTasks(Fragile):
    """All episodes of a task fail, or none."""

    def step(self, action: str) -> tuple[Any, ...]:
        if self.fate != "fine":
            raise RuntimeError("this task never works")
        return super().step(action)


@dataclass
class FlakyConfig(EnvironmentConfig):
    """`folder` counts the resets of each seed, over all processes.

    The first `crashes` of them fail.
    """

    folder: str = ""
    crashes: int = 2


class Flaky(Fragile):
    """Fails at first, and is fine when it is tried again."""

    config_cls = FlakyConfig
    config: FlakyConfig

    def reset(self, seed: int | None = None) -> str:
        super().reset(seed)
        self.fate = "fine"
        for number in range(self.config.crashes):
            try:
                os.close(
                    os.open(Path(self.config.folder) / f"{seed}.{number}", os.O_CREAT | os.O_EXCL)
                )
            except FileExistsError:
                continue
            self.fate = "crash"
            break
        return "guess"


class Hanging(Fragile):
    """Hangs in its first step where `Fragile` would fail."""

    def step(self, action: str) -> tuple[Any, ...]:
        if self.fate != "fine":
            time.sleep(3)
        self.fate = "fine"
        return super().step(action)


class Stuck(Fragile):
    """Hangs in its first step, for longer than anyone waits."""

    def step(self, action: str) -> tuple[Any, ...]:
        time.sleep(300)
        return super().step(action)


class Steady(Fragile):
    """Never fails."""

    def reset(self, seed: int | None = None) -> str:
        return super().reset(0)


class Even(BaseEnvironment):
    """One turn; the reward says whether the number is even."""

    def reset(self, seed: int | None = None) -> str:
        return "guess the number"

    def step(self, action: str) -> tuple[Any, ...]:
        return "correct", reward_of(action), True, {}


class Higher(Even):
    """The same in other words."""

    def reset(self, seed: int | None = None) -> str:
        return "higher"


class Equal(Even):
    """Every answer is worth the same."""

    def step(self, action: str) -> tuple[Any, ...]:
        return "correct", 0.5, True, {}


class Rare(Even):
    """Answers differ in worth in one task of three."""

    def reset(self, seed: int | None = None) -> str:
        self.varies = rare_varies(seed or 0)
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return "correct", random.random() if self.varies else 0.5, True, {}


def rare_varies(seed: int) -> bool:
    return seed % 3 == 0


class Shell:
    """An environment without any of the optional methods, and not derived from anything."""

    def reset(self) -> str:
        self.turn = 0
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        self.turn += 1
        return "lower", 0.0, self.turn == 3, {}


class Counting:
    """An agent of one's own: it speaks for the environment, and rewards the number of its turn."""

    def __init__(self, environment: Any) -> None:
        self.environment = environment

    def reset(self, seed: int) -> list[dict[str, str]]:
        self.turn = 0
        return [{"role": "user", "content": f"the number {self.environment.reset()}"}]

    def step(self, response_text: str) -> tuple[list[dict[str, str]], float, bool, dict[str, Any]]:
        self.turn += 1
        observation, _, done, info = self.environment.step(response_text)
        return [{"role": "user", "content": observation}], float(self.turn), done, info


def reward_fn(trajectory: Trajectory, environment: Any) -> float:
    """Ten times the turns, and one where the environment is the one of the trajectory."""
    return 10.0 * len(trajectory) + float(environment.turn == len(trajectory))


class Drawn(Fragile):
    """Its task is another at every reset, whatever the seed.

    The members of a group get different ones.
    """

    def reset(self, seed: int | None = None) -> str:
        super().reset(0)
        return f"guess {random.SystemRandom().random()}"


class Wanderer(Fragile):
    """Leaves the folder that the run was started in."""

    def reset(self, seed: int | None = None) -> str:
        os.chdir("/")
        return super().reset(0)
