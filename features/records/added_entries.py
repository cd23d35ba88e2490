"""Asks other features what they add to the record of an episode: `record_entries` of a `Feature`.

Invariant: what goes wrong in one of them costs its own entries and not the record: it is asked no
more in this process, which is said once. No entry takes the place of another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from data.loading import load_object
from training.config import PPOConfig
from training.features import named
from workers.model.probe import raises_faults
from workers.rollout.episode import Episode

logger = logging.getLogger(__name__)
Entries = Callable[[Episode], Mapping[str, Any]]


class AddedEntries:
    """Collects the entries that features add.

    Args:
        adding: functions of an episode, by the names of their features.
    """

    def __init__(self, adding: Mapping[str, Entries]) -> None:
        self.adding = dict(adding)

    def of(self, episode: Episode, record: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries for an episode, behind the failure policy.

        Args:
            record: all that the episode's record has by itself.
        """
        added: dict[str, Any] = {}
        for feature, entries_of in list(self.adding.items()):
            try:
                entries = dict(entries_of(episode))
                _require_own(entries, {*record, *added})
            except MemoryError:
                raise
            except Exception:
                if raises_faults():
                    raise
                logger.warning(
                    "features/%s adds nothing to the records of episodes any more, which are "
                    "recorded without it",
                    feature,
                    exc_info=True,
                )
                del self.adding[feature]
                continue
            added |= entries
        return added


def _require_own(entries: Mapping[str, Any], taken: set[str]) -> None:
    """Raises ValueError where an entry has the name of another one."""
    doubled = sorted(taken & entries.keys())
    if doubled:
        raise ValueError(
            f"record_entries returned {', '.join(doubled)}, which the record has: give them names "
            "of their own"
        )


def open_added_entries(config: PPOConfig) -> AddedEntries:
    """Opens what features add to records, as the config says."""
    adding: dict[str, Entries] = {}
    for feature, place in named("record_entries"):
        entries_of = load_object(place, f"feature {feature}")(config)
        if entries_of is not None:
            adding[feature] = entries_of
    return AddedEntries(adding)
