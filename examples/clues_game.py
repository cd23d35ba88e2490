"""A game that is longer than one context: clues spread over much text, and a question at the end.

    task remember                         the policy: next
    clue red4 hill sea road …             next           five clues, each in a context's worth
    …                                     next           of text
    question red stone hill tree …        red4           1 for the right clue, else 0

Which colour is asked is not known before the end: whoever is to answer has to carry all clues
along. Invariant: its words are those that the model of examples/prepare_clues.py knows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from custom.env import BaseEnvironment, EnvironmentConfig

TASK = "task remember"
NEXT = "next"
COLOURS = ("red", "blue", "green", "white", "black")
# Of each colour there is one clue in a game.
CLUES = {colour: [f"{colour}{number}" for number in range(1, 9)] for colour in COLOURS}
FILLERS = ("hill", "sea", "road", "stone", "tree", "wind", "house", "field", "river", "night")


@dataclass
class CluesConfig(EnvironmentConfig):
    """Sets how many words of filler stand behind a clue."""

    filler: int = 16


class Clues(BaseEnvironment):
    """Tells five clues, one a turn, and asks for one of them."""

    config_cls = CluesConfig
    max_turns = len(COLOURS) + 2

    def reset(self, seed: int | None = None) -> str:
        """Draws the clues, their order, and which is asked."""
        self.draw = random.Random(seed)
        self.clues = {colour: self.draw.choice(CLUES[colour]) for colour in COLOURS}
        self.left = self.draw.sample(COLOURS, len(COLOURS))
        self.asked = self.draw.choice(COLOURS)
        self.has_asked = False
        return TASK

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Tells the next clue, whatever the action is, then asks, then ends."""
        if self.has_asked:
            is_right = action.strip() == self.clues[self.asked]
            return "", float(is_right), True, {"won": is_right}
        if self.left:
            colour = self.left.pop(0)
            return self._long(f"clue {self.clues[colour]}"), 0.0, False, {}
        self.has_asked = True
        return self._long(f"question {self.asked}"), 0.0, False, {}

    def sample_action(self, generator: random.Random) -> str:
        """Draws an action that may be right at the end."""
        return generator.choice(CLUES[generator.choice(COLOURS)])

    def _long(self, text: str) -> str:
        """Returns the text with fillers behind it."""
        return " ".join([text, *self.draw.choices(FILLERS, k=self.config.filler)])
