"""What a feature keeps of episodes beside the rows that are trained on: `EpisodeKeeper`.

Where episodes have been played, on the engine's rank, `AgentRollout.rows_of` calls, in order:

    begin                             with all episodes, as they were played
      before_policy -> after_policy   of each episode, around the failure policy
    columns                           for the batch's rows

Invariants: keepers read episodes and never change them; what they add to a batch no phase reads. A
keeper that raises costs itself and not the run: it is off on its rank from then on, which is said
once, and its columns are 0 there. Ctrl-C and out of memory pass through.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from data.loading import load_object
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from training.features import named
from workers.model.probe import raises_faults
from workers.rollout.episode import Episode

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class EpisodeKeeper:
    """Keeps something of episodes; every method may be left out.

    Attributes:
        column_types: of what `columns` returns, by name: rows come from several ranks, and each
            has the same columns.
    """

    column_types: ClassVar[Mapping[str, torch.dtype]] = {}

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Sees all episodes of a batch, as they were played."""

    def before_policy(self, episode: Episode) -> None:
        """Sees an episode before the failure policy takes from it what is not trained on."""

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sees it behind the failure policy, with its facts; returns facts to add to those."""
        return {}

    def columns(self, width: int) -> Mapping[str, Tensor]:
        """Returns tensors (B, width), a row for each row of the episodes, by name."""
        return {}


class Keepers:
    """Asks keepers, in order, and switches off those that raise.

    Args:
        named: keepers by the names of their features.
    """

    def __init__(self, named: Mapping[str, EpisodeKeeper]) -> None:
        self.named = dict(named)
        self.off: set[str] = set()

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Shows all episodes of a batch."""
        self._ask(lambda keeper: keeper.begin(episodes))

    def before_policy(self, episode: Episode) -> None:
        """Shows an episode before the failure policy."""
        self._ask(lambda keeper: keeper.before_policy(episode))

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Shows it behind the failure policy; returns what keepers add to its facts."""
        added: dict[str, Any] = {}
        for of_keeper in self._ask(lambda keeper: dict(keeper.after_policy(episode, facts))):
            added |= of_keeper
        return added

    def columns(self, num_rows: int, width: int) -> dict[str, Tensor]:
        """Returns the keepers' columns, (num_rows, width) each; 0 of those that are off."""
        found: dict[str, Tensor] = {}
        for of_keeper in self._ask(lambda keeper: _columns_of(keeper, num_rows, width)):
            found |= of_keeper
        for name in self.off:
            for column, dtype in self.named[name].column_types.items():
                found[column] = torch.zeros(num_rows, width, dtype=dtype)
        return found

    def _ask(self, ask: Callable[[EpisodeKeeper], Answer]) -> list[Answer]:
        """Calls each keeper; returns the answers of those that did not raise."""
        answers = []
        for name, keeper in self.named.items():
            if name in self.off:
                continue
            try:
                answers.append(ask(keeper))
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:
                if raises_faults():
                    raise
                logger.warning(
                    "the keeper of episodes of %s is off, the run goes on without it",
                    name,
                    exc_info=True,
                )
                self.off.add(name)
        return answers


def _columns_of(keeper: EpisodeKeeper, num_rows: int, width: int) -> dict[str, Tensor]:
    """Returns a keeper's columns.

    Raises:
        ValueError: they are not what `column_types` says.
    """
    columns = dict(keeper.columns(width))
    shown = {name: (tuple(column.shape), column.dtype) for name, column in columns.items()}
    wanted = {name: ((num_rows, width), dtype) for name, dtype in keeper.column_types.items()}
    if shown != wanted:
        raise ValueError(f"columns returned {shown}; its column_types make it {wanted}")
    return columns


def open_keepers(config: PPOConfig, tokens: TurnTokens) -> Keepers:
    """Opens the features' keepers, as the config says.

    Args:
        tokens: how the policy's template puts turns together.
    """
    return Keepers(dict(_opened(config, tokens)))


def _opened(config: PPOConfig, tokens: TurnTokens) -> Iterator[tuple[str, EpisodeKeeper]]:
    for feature, place in named("keeper"):
        keeper = load_object(place, f"feature {feature}")(config, tokens)
        if keeper is not None:
            yield feature, keeper
