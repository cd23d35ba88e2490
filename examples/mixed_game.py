"""A mixture of tasks that teach nothing and tasks that teach: questions of one word each.

    question q17          the policy: a3          1 for the right answer, else 0

Of 120 questions 24 are easy (the model of examples/prepare_mixed.py knows their answers), 24 are
apt (it has a wrong answer in mind, and gives the right one three times in ten), and 72 are
impossible: no answer is right, as where a test is broken. Which is which the prompt does not say.
Invariant: a seed always asks the same question, and its words are those that the model knows.
"""

from __future__ import annotations

import random
from typing import Any

from custom.env import BaseEnvironment

ANSWERS = tuple(f"a{number}" for number in range(4))
EASY = 24
APT = 24
IMPOSSIBLE = 72
QUESTIONS = EASY + APT + IMPOSSIBLE


def question_of(seed: int) -> int:
    """Returns which question a seed asks; the first 120 seeds ask each of them once."""
    return seed % QUESTIONS


def kind_of(question: int) -> str:
    """Says whether a question is easy, apt or impossible."""
    if question < EASY:
        return "easy"
    return "apt" if question < EASY + APT else "impossible"


def answer_to(question: int) -> str:
    """Returns the answer that is right, unless the question is impossible."""
    return random.Random(f"answer {question}").choice(ANSWERS)


def wrong_answer_to(question: int) -> str:
    """Returns the wrong answer that the model has in mind."""
    others = [answer for answer in ANSWERS if answer != answer_to(question)]
    return random.Random(f"wrong {question}").choice(others)


class Questions(BaseEnvironment):
    """Asks one question."""

    max_turns = 1

    def reset(self, seed: int | None = None) -> str:
        """Chooses the question by the seed."""
        self.question = question_of(seed or 0)
        return f"question q{self.question}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Pays 1 for the right answer."""
        is_right = action.strip() == answer_to(self.question)
        is_possible = kind_of(self.question) != "impossible"
        return "", float(is_right and is_possible), True, {}

    def sample_action(self, generator: random.Random) -> str:
        """Draws an answer."""
        return generator.choice(ANSWERS)
