"""What a feature keeps of episodes beside the rows that are trained on: `EpisodeKeeper`.

Where episodes have been played, on the engine's rank, `AgentRollout.rows_of` calls, in order:

    begin                             with all episodes, as they were played
      before_policy -> after_policy   of each episode, around the failure policy
    columns                           for the batch's rows

Invariants: keepers read episodes and never change them; what they add to a batch no phase reads,
and no name of theirs is one of the core's: such a column is refused at the start. A keeper that
raises costs itself and not the run: it is off on its rank from then on, which is said once, and its
columns are 0 there. Ctrl-C and out of memory pass through.
"""

import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from data.batch_fields import FIELDS, KEEPERS
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
            has the same columns. No name is a field that the trainer writes (data/fields.yaml).
    """

    column_types: ClassVar[Mapping[str, torch.dtype]] = {}

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Sees all episodes of a batch, as they were played."""

    def before_policy(self, episode: Episode) -> None:
        """Sees an episode before the failure policy takes from it what is not trained on."""

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sees it behind the failure policy, with its facts; returns facts of other names."""
        return {}

    def columns(self, width: int) -> Mapping[str, Tensor]:
        """Returns tensors (B, width), a row for each row of the episodes, by name."""
        return {}


class Keepers:
    """Asks keepers, in order, and switches off those that raise.

    Args:
        named: keepers by the names of their features.

    Raises:
        ValueError: a keeper's column is a field of the trainer's, or another keeper's.
    """

    def __init__(self, named: Mapping[str, EpisodeKeeper]) -> None:
        self.named = dict(named)
        _require_own_columns(self.named)
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
        for of_keeper in self._ask(lambda keeper: _facts_of(keeper, episode, facts)):
            added |= of_keeper
        return added

    def columns(self, num_rows: int, width: int, taken: Container[str] = ()) -> dict[str, Tensor]:
        """Returns the keepers' columns, (num_rows, width) each; 0 of those that are off.

        Args:
            taken: what the batch has.

        Raises:
            ValueError: a keeper's column would take the place of what the batch has.
        """
        for name, keeper in self.named.items():
            for column in keeper.column_types:
                if column in taken:
                    raise ValueError(_refusal(name, keeper, column, "what the batch has already"))
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


def _require_own_columns(named: Mapping[str, EpisodeKeeper]) -> None:
    """Requires that no keeper's column takes the place of another one in the batch.

    Raises:
        ValueError: naming the feature, the column, and whose it is.
    """
    owners: dict[str, str] = {}
    for feature, keeper in named.items():
        for column in keeper.column_types:
            owner = ""
            if column in FIELDS and FIELDS[column].writer != KEEPERS:
                owner = f"a field that {FIELDS[column].writer} writes and the run trains on"
            elif column in owners:
                owner = f"a column of the keeper of {owners[column]}"
            if owner:
                raise ValueError(_refusal(feature, keeper, column, owner))
            owners[column] = feature


def _refusal(feature: str, keeper: EpisodeKeeper, column: str, owner: str) -> str:
    """Says why a keeper's column is refused."""
    return (
        f"the keeper of episodes of feature {feature} ({type(keeper).__name__}) names {column!r} "
        f"in its column_types, which is {owner}: a keeper adds columns of its own; call it "
        f"{feature + '_' + column!r}, say"
    )


def _facts_of(keeper: EpisodeKeeper, episode: Episode, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a keeper adds to an episode's facts.

    Raises:
        ValueError: the episode has a fact of such a name.
    """
    added = dict(keeper.after_policy(episode, facts))
    taken = sorted(added.keys() & facts.keys())
    if taken:
        raise ValueError(
            f"after_policy returned {', '.join(taken)}, which the episode's facts have: a keeper "
            "adds facts of other names"
        )
    return added


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
