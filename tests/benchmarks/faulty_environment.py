"""The environment of tests/benchmarks/environment_faults.py.

It imports little, as every process that it lives in loads this file.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from custom.env import BaseEnvironment, EnvironmentConfig

HANG_S = 2.5
MEGABYTE = 1 << 20
KINDS = {
    "crash": 0.10,
    "hang": 0.05,
    "tuple": 0.05 / 3,
    "nan": 0.05 / 3,
    "megabyte": 0.05 / 3,
}  # else "well"
ENDINGS = {
    "crash": "env_crash",
    "hang": "env_timeout",
    "tuple": "env_crash",
    "nan": "env_crash",
}  # else "max_turns"


def kind_of(seed: int) -> str:
    """What the environment of an episode with this seed does."""
    draw = random.Random(seed).random()
    for kind, part in KINDS.items():
        if draw < part:
            return kind
        draw -= part
    return "well"


@dataclass
class FaultyConfig(EnvironmentConfig):
    deadly: bool = (
        False  # every second crash ends the process; only where it is the environment's own
    )


class Faulty(BaseEnvironment):
    """A game without an end that pays for even numbers of words.

    In its second turn it fails as its seed says.
    """

    config_cls = FaultyConfig
    config: FaultyConfig

    def reset(self, seed: int | None = None) -> str:
        self.dies = self.config.deadly and bool(seed) and int(seed or 0) % 2 == 0
        self.kind, self.turn = kind_of(int(seed or 0)), 0
        return "guess"

    def step(self, action: str) -> Any:
        self.turn += 1
        reward = float(len(action.split()) % 2 == 0)
        if self.turn == 2:
            if self.kind == "crash" and self.dies:
                os._exit(1)
            if self.kind == "crash":
                raise RuntimeError("this environment crashes")
            if self.kind == "hang":
                time.sleep(HANG_S)
            if self.kind == "tuple":
                return {"observation": "guess"}
            if self.kind == "nan":
                return "guess", float("nan"), False, {}
            if self.kind == "megabyte":
                return "guess " * (MEGABYTE // 6), reward, False, {}
        return "guess", reward, False, {}
