"""A game for sub-agents: four pages of text, one clue in them, and a question.

    the policy is asked                    question red                           look
    each page is read by a sub-agent       page hill red4 sea … find red          red4
                                           page stone green2 road … find red      nothing
    the policy reads what they found       found red4 nothing …                   red4

The sub-agents are the policy itself, asked in the game's first step, all pages at once. The pages
together are longer than what the policy may read. It pays 1 for the right clue, else 0.
Invariant: its words are those that the model of examples/prepare_pages.py knows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from custom.env import BaseEnvironment, EnvironmentConfig
from features.policy_calls import policy

COLOURS = ("red", "blue", "green", "white", "black")
CLUES = {colour: [f"{colour}{number}" for number in range(1, 9)] for colour in COLOURS}
FILLERS = ("hill", "sea", "road", "stone", "tree", "wind", "house", "field", "river", "night")
NOTHING = "nothing"
PAGES = 4


@dataclass
class PagesConfig(EnvironmentConfig):
    """Sets how long a page is, and what a sub-agent's answer earns.

    Attributes:
        filler: words of a page beside its clue.
        credit: `episode`: what the episode earns; `own`: 1 where it is right of its page, else 0;
            `none`: it is not trained on.
    """

    filler: int = 12
    credit: Literal["episode", "own", "none"] = "episode"


class Pages(BaseEnvironment):
    """Asks for a clue, and has sub-agents read the pages."""

    config_cls = PagesConfig
    max_turns = 2

    def reset(self, seed: int | None = None) -> str:
        """Draws the pages and the question."""
        draw = random.Random(seed)
        colours = draw.sample(COLOURS, PAGES)
        self.asked = draw.choice(colours)
        self.clues = [draw.choice(CLUES[colour]) for colour in colours]
        self.right = self.clues[colours.index(self.asked)]
        self.pages = [page_text(draw, clue, self.config.filler, self.asked) for clue in self.clues]
        self.has_looked = False
        return f"question {self.asked}"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """Has the pages read, whatever the action is; then pays for the right clue."""
        if not self.has_looked:
            self.has_looked = True
            return found_text(self.read_pages()), 0.0, False, {}
        is_right = action.strip() == self.right
        return "", float(is_right), True, {"won": is_right}

    def read_pages(self) -> list[str]:
        """Asks a sub-agent for each page; returns what they say."""
        credit = self.config.credit
        replies = policy.ask_all(self.pages, train=credit != "none", name="reader", max_tokens=3)
        if credit == "own":
            for clue, reply in zip(self.clues, replies, strict=True):
                wanted = clue if clue == self.right else NOTHING
                reply.reward = float(reply.text.strip() == wanted)
        return [reply.text.strip() for reply in replies]

    def sample_action(self, generator: random.Random) -> str:
        """Draws an action that may be right."""
        return generator.choice(CLUES[generator.choice(COLOURS)])


def page_text(draw: random.Random, clue: str, filler: int, asked: str) -> str:
    """Writes what a sub-agent reads: a page with a clue somewhere in it, and what is looked for."""
    words = draw.choices(FILLERS, k=filler)
    words.insert(draw.randrange(filler + 1), clue)
    return f"page {' '.join(words)} find {asked}"


def found_text(found: list[str]) -> str:
    """Writes what the policy reads of what the sub-agents found."""
    return f"found {' '.join(found)}"
