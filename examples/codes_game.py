"""A game whose reward is rare, and whose hints tell half of what is to be known.

    code of mia                      the policy: 4 7          1 for mia's code, else 0
    (hint, for a teacher alone: begins 4)

Each name has a code of two of eight digits, always the same; nothing that the policy reads tells
it. Who guesses is right once in 64 times. A hint, which goes into the step's `info` and not into
the conversation, tells the first digit. Invariant: its words are those that the model of
examples/prepare_codes.py knows.
"""

from __future__ import annotations

import random
from typing import Any

from custom.env import BaseEnvironment

NAMES = ("mia", "leo", "ada", "ben", "eva", "tom", "lin", "max")
DIGITS = tuple("12345678")
ASKED = "code of"
# The model of examples/prepare_codes.py knows two digits more for each name.
KNOWN = "year of"
HINT = "begins"


def code_of(name: str, what: str = ASKED) -> tuple[str, str]:
    """Returns the code of a name, or its year."""
    draw = random.Random(f"{what} {name}")
    return draw.choice(DIGITS), draw.choice(DIGITS)


class Codes(BaseEnvironment):
    """Asks for the code of a name."""

    max_turns = 1

    def reset(self, seed: int | None = None) -> str:
        """Draws a name."""
        self.name = random.Random(seed).choice(NAMES)
        return f"{ASKED} {self.name}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Pays the right code; the hint is for a teacher."""
        code = code_of(self.name)
        is_right = tuple(action.split()) == code
        return "", float(is_right), True, {"won": is_right, "hint": f"{HINT} {code[0]}"}

    def sample_action(self, generator: random.Random) -> str:
        """Draws any code."""
        return " ".join(generator.choices(DIGITS, k=2))
