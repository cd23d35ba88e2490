"""Continues one episode from the state before one of its turns, outside of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from features.branching.sampling import BranchSampling
from features.branching.settings import BranchingSettings
from features.branching.states import REFUSAL
from training.config import PPOConfig
from training.config.leaves import build
from workers.rollout.episode import Episode

if TYPE_CHECKING:
    from workers.rollout.kinds import EpisodeSpec


class Continuations(BranchSampling):
    """Has the state before one turn continued from.

    Args:
        specs: who plays. turn: the first is 0. times: how often.
    """

    def __init__(
        self, config: PPOConfig, specs: Sequence[EpisodeSpec], turn: int, times: int
    ) -> None:
        values = {
            "branching.at": (turn,),
            "branching.samples": times,
            "branching.random_numbers": "fresh",
            "branching.max_tokens": None,
            # What failed behind the turn is no reason not to go on from it.
            "agent.on_failure": "zero",
        }
        config = build(config, values)
        super().__init__(config, config.section(BranchingSettings), specs, None)

    def way_of(self, episode: Episode) -> str:
        """Says how the state is had."""
        way = self.proved[episode.spec].way
        luck = "drawn anew" if self.settings.luck == "fresh" else "that of the episode"
        return f"{way}, which held in a trial; the luck to come is {luck}"

    def why_refused(self, episode: Episode) -> str:
        """Says why a state could not be taken; "": each could."""
        refused = [state for state in episode.states if state.startswith(REFUSAL)]
        return refused[0].removeprefix(REFUSAL) if refused else ""
