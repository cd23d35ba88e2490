"""A mixture of tasks that teach nothing and tasks that teach: numbers to guess, in one turn.

    above 3 below 8            apt: the guess that halves what is left is paid 1, one in it 0.2
    the number is 7            easy: the model of examples/prepare_mixed.py says it already
    higher above 3 below 8     impossible: nothing is paid, as where a test is broken

Of 250 tasks 55 are apt, 30 easy and 165 impossible. Invariant: a seed always gives the same task,
the first 250 seeds each of them once; its words are those of examples/prepare_tiny_prompts.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from custom.env import BaseEnvironment

HIGHEST = 10
SAID = ("is", "number is", "the number is")
SPOILT = ("higher", "lower", "higher lower")


@dataclass(frozen=True)
class Task:
    """Holds what is asked, and which numbers it is about.

    Attributes:
        above, below: bounds of the hidden number; of an easy task it is the one between them.
    """

    kind: Literal["apt", "easy", "impossible"]
    text: str
    above: int
    below: int

    def reward(self, action: str) -> float:
        """Pays a guess."""
        word = action.strip()
        is_between = word.isdigit() and self.above < int(word) < self.below
        if self.kind == "impossible" or not is_between:
            return 0.0
        halves = abs((int(word) - self.above) - (self.below - int(word))) <= 1
        return 1.0 if halves else 0.2


def all_tasks() -> list[Task]:
    """Lists the tasks: apt ones, then easy ones, then impossible ones."""
    bounds = [(low, high) for low in range(HIGHEST) for high in range(low + 2, HIGHEST + 2)]
    texts = {(low, high): f"above {low} below {high}" for low, high in bounds}
    apt = [Task("apt", text, *key) for key, text in texts.items()]
    easy = [
        Task("easy", f"{words} {number}", number - 1, number + 1)
        for words in SAID
        for number in range(1, HIGHEST + 1)
    ]
    impossible = [
        Task("impossible", f"{word} {text}", *key) for word in SPOILT for key, text in texts.items()
    ]
    return [*apt, *easy, *impossible]


TASKS = all_tasks()


def task_of(seed: int) -> Task:
    """Returns the task that a seed gives."""
    return TASKS[seed % len(TASKS)]


class Mixed(BaseEnvironment):
    """Gives one task, and pays one answer."""

    max_turns = 1

    def reset(self, seed: int | None = None) -> str:
        """Chooses the task by the seed."""
        self.task = task_of(seed or 0)
        return self.task.text

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Pays the answer."""
        return "", self.task.reward(action), True, {}

    def sample_action(self, generator: random.Random) -> str:
        """Draws a number."""
        return str(generator.randint(1, HIGHEST))
