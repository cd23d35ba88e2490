"""The agent of program_speed, in an environment: alone, and with the work that a program has.

An environment that works takes as much of a processor as a program does, at the same moments: its
start, and each of its requests. What a program is then slower by is not its own work.
"""

import time
from typing import Any

from custom.env import BaseEnvironment

FIRST = "above 3"
NEXT = "higher"


class Same(BaseEnvironment):
    """Says what the programs say.

    Args:
        words: further words of the first message.
        start_s, turn_s: seconds of a processor that its start and each of its turns take.
    """

    def __init__(self, words: int = 0, start_s: float = 0.0, turn_s: float = 0.0) -> None:
        self.first = FIRST + " 5" * words
        self.start_s = start_s
        self.turn_s = turn_s

    def reset(self, seed: int | None = None) -> str:
        """Begins, and makes its first request."""
        work(self.start_s + self.turn_s)
        return self.first

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Makes the next request."""
        work(self.turn_s)
        return NEXT, 0.0, False, {}


def work(seconds: float) -> None:
    """Keeps a processor busy; what this process waits for one does not count."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
