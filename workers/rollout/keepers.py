"""What a feature keeps of episodes beside the rows that are trained on: `EpisodeKeeper`.

Where episodes have been played, on the engine's rank, `AgentRollout.rows_of` calls, in order:

    begin                             with all episodes, as they were played
      before_policy -> after_policy   of each episode, around the failure policy
    columns                           for the batch's rows

Invariant: keepers read episodes and never change them; what they add to a batch no phase reads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from data.loading import load_object
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from training.features import named
from workers.rollout.episode import Episode


class EpisodeKeeper:
    """Keeps something of episodes; every method may be left out."""

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Sees all episodes of a batch, as they were played."""

    def before_policy(self, episode: Episode) -> None:
        """Sees an episode before the failure policy takes from it what is not trained on."""

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sees it behind the failure policy, with its facts; returns facts to add to those."""
        return {}

    def columns(self, width: int) -> Mapping[str, Tensor]:
        """Returns tensors (B, width), or (B,), a row for each row of the episodes, by name."""
        return {}


def open_keepers(config: PPOConfig, tokens: TurnTokens) -> list[EpisodeKeeper]:
    """Opens the features' keepers, as the config says.

    Args:
        tokens: how the policy's template puts turns together.
    """
    return list(_opened(config, tokens))


def _opened(config: PPOConfig, tokens: TurnTokens) -> Iterator[EpisodeKeeper]:
    for feature, place in named("keeper"):
        keeper = load_object(place, f"feature {feature}")(config, tokens)
        if keeper is not None:
            yield keeper
