"""Keeps the record of each episode, and where its tokens come from, on the engine's rank."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data.turn_tokens import TurnTokens
from features.records.added_entries import AddedEntries, open_added_entries
from features.records.episode_entries import RECORD
from features.records.episode_records import encode_record, episode_record
from features.records.row_records import row_records
from features.records.settings import RecordsSettings
from features.records.token_origins import RowOrigins, TokenOrigins
from training.config import PPOConfig
from workers.rollout.episode import Episode
from workers.rollout.keepers import EpisodeKeeper


def open_keeper(config: PPOConfig, tokens: TurnTokens) -> "RecordKeeper | None":
    """Opens the keeper of records; None where nothing is recorded."""
    if not config.section(RecordsSettings).is_on:
        return None
    return RecordKeeper(tokens, open_added_entries(config))


class RecordKeeper(EpisodeKeeper):
    """Puts the record of an episode among its facts, and `token_origins` (B, R) into the batch.

    Args:
        added: what other features add to records.
    The record is of the episode before the failure policy; see `take_played_episodes`.
    """

    column_types: ClassVar = {"token_origins": torch.int8}

    def __init__(self, tokens: TurnTokens, added: AddedEntries) -> None:
        self.origins = TokenOrigins(tokens)
        self.added = added
        # The rest of the records of the batch's rows, and the origins of each row's tokens.
        self._rows: Iterator[dict[str, Any]] = iter(())
        self._row_origins: list[bytes] = []
        self._of_episode: Sequence[RowOrigins] = ()

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Reads the rows of all episodes at once, which is faster than one by one."""
        self._rows = row_records([row for episode in episodes for row in episode.rows])
        self._row_origins = []

    def before_policy(self, episode: Episode) -> None:
        """Tells the origins of the episode's tokens."""
        self._of_episode = self.origins.of_episode(episode)

    def after_policy(self, episode: Episode, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        """Makes the record."""
        record = episode_record(episode, self._rows, self._of_episode)
        record |= self.added.of(episode, {**facts, **record})
        self._row_origins += [row.origins for row in self._of_episode]
        return {RECORD: encode_record(facts, record)}

    def columns(self, width: int) -> Mapping[str, Tensor]:
        """Returns `token_origins`, (B, width) int8, 0 on padding."""
        origins = torch.from_numpy(origin_matrix(self._row_origins, width))
        self._row_origins = []
        return {"token_origins": origins}


def origin_matrix(origins: Sequence[bytes], width: int) -> np.ndarray:
    """Returns where each row's tokens come from, 0 on padding: (B, width) int8."""
    padded = b"".join(of_row.ljust(width, b"\0") for of_row in origins)
    return np.frombuffer(bytearray(padded), np.int8).reshape(len(origins), width)
