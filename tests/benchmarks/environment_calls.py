"""What the pool adds to a step of an environment that does nothing.

Python -m tests.benchmarks.environment_calls

Fails where it is more than the microseconds in MOST_US.
"""

from __future__ import annotations

import sys
import time

from custom.agent import AgentSpec
from custom.env import BaseEnvironment
from workers.environments.pool import EnvironmentPool

MOST_US = {"thread": 400.0, "process": 1000.0}
CALLS, ROUNDS = 100, 5


class Echo(BaseEnvironment):
    """Repeats what it is told."""

    def reset(self, seed: int | None = None) -> str:
        return "go on"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, object]]:
        return action, 0.0, False, {}


def microseconds_per_step(isolation: str) -> float:
    """Returns the best of ROUNDS measurements of CALLS steps each."""
    times = []
    with EnvironmentPool(
        [AgentSpec(Echo)], isolation=isolation, step_timeout_s=5.0, episode_timeout_s=60.0
    ) as pool:  # type: ignore[arg-type]
        pool.reset("a", 0, 0)
        pool.poll(60.0)
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            for _ in range(CALLS):
                pool.step("a", "x")
                pool.poll(5.0)
            times.append((time.perf_counter() - begun) / CALLS * 1e6)
    return min(times)


if __name__ == "__main__":
    measured = {isolation: microseconds_per_step(isolation) for isolation in MOST_US}
    for isolation, us in measured.items():
        print(f"{isolation}: {us:.0f} us a step, at most {MOST_US[isolation]:.0f}")
    sys.exit(int(any(us > MOST_US[isolation] for isolation, us in measured.items())))
