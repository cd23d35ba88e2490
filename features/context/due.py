"""Decides when a context is to end: past so many tokens or turns, or where it is full.

Invariant: how many turns a context has is drawn from its own seed alone, so that whoever plays the
episode again draws the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from features.context.settings import ContextSettings
from workers.rollout.history import Standing


@dataclass(frozen=True)
class Due:
    """Tells whether a new context is to begin, by `context.after_tokens` and `after_turns`."""

    settings: ContextSettings

    def is_due(self, standing: Standing) -> bool:
        """Returns whether the context is to end behind this turn."""
        if standing.is_full:
            return True
        after_tokens = self.settings.after_tokens
        if after_tokens is not None and standing.tokens > after_tokens:
            return True
        least = self.settings.after_turns
        return least is not None and standing.turns >= self.turns_of(standing.seed, least)

    def turns_of(self, seed: int, least: int) -> int:
        """Draws the number of turns of the context with this seed."""
        most = self.settings.most_turns
        return least if most is None else random.Random(seed).randint(least, most)
