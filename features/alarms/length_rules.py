"""Looks for answers, episodes and turns that end at their limits.

Invariant: a run whose turns were cut from its first step on rings only where nearly all are; one
whose turns began to be cut rings at half.
"""

from collections.abc import Iterator

from features.alarms.catalogue import Finding
from features.alarms.history import Metrics

# Shares of answers that fill their limit, and of turns that are cut.
FULL_ANSWERS = 0.7
CUT_TURNS = 0.95
# The share of cut turns in a run in which fewer than FEW_CUT_TURNS once were cut.
NEWLY_CUT_TURNS = 0.5
FEW_CUT_TURNS = 0.1


class LengthRules:
    """Watches lengths over a run.

    Attributes:
        fewest_cut: the smallest share of a step's turns that was cut so far.
    """

    def __init__(self) -> None:
        self.fewest_cut = 1.0

    def check(self, metrics: Metrics) -> Iterator[Finding]:
        """Finds what ends at its limit in a step."""
        episodes = max(metrics.get("agent/episodes", 0.0), 1.0)
        full = metrics.get("response_length/clip_ratio", 0.0)
        if full >= FULL_ANSWERS:
            yield Finding("length_pinned", f"{full:.0%} of answers fill data.max_response_length")
        overflowing = metrics.get("agent/ending/overflow", 0.0) / episodes
        if overflowing >= FULL_ANSWERS:
            yield Finding("length_pinned", f"{overflowing:.0%} of episodes overflow it")
        turns = episodes * metrics.get("agent/turns/mean", 0.0)
        if turns:
            yield from self._check_turns(metrics.get("agent/cut_turns", 0.0) / turns)

    def _check_turns(self, cut: float) -> Iterator[Finding]:
        """Finds turns that are cut: nearly all, or many where few were."""
        text = f"{cut:.0%} of turns were cut at their limit"
        if cut >= CUT_TURNS:
            yield Finding("length_pinned", text)
        elif cut > NEWLY_CUT_TURNS and self.fewest_cut < FEW_CUT_TURNS:
            yield Finding("length_pinned", f"{text}; in an earlier step {self.fewest_cut:.0%} were")
        self.fewest_cut = min(self.fewest_cut, cut)
