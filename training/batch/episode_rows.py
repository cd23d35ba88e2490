"""Which rows of a batch belong to one episode, and the way from rows to episodes and back.

Estimators, filters and metrics see episodes, so that one counts once however many rows it has, and its rewards reach
back over all of them. Invariant: dummy rows, which only pad a batch to the ranks, are an episode each, and enter no
average.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from data.containers import row_sums
from data.protocol import DUMMY_UID, DataProto
from training.batch.batching import rows_by_key
from training.batch.torch_functional import sampled_sums


def real_rows(batch: DataProto) -> Tensor:
    """Returns (B,) bool: False for dummy rows."""
    uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)))
    return torch.from_numpy(uids.astype(object) != DUMMY_UID)


def observation_mask(batch: DataProto) -> Tensor:
    """Marks what environments said inside responses: (B, R) int8, 0 on sampled tokens, padding and dummy rows.

    A row without a sampled token is of an episode that is left out: its turns are not known there.
    """
    width = batch.batch["responses"].shape[1]
    said = batch.batch["attention_mask"][:, -width:].bool() & (batch.batch["turn_ids"] < 0)
    kept = real_rows(batch) & (batch.batch["turn_ids"] >= 0).any(dim=1)
    return (said & kept[:, None]).to(torch.int8)


class EpisodeRows:
    """Groups a batch's rows (B) by `episode_id` into E episodes, in the order of their first rows.

    Where an episode has several rows, its line holds the sampled tokens of all of them, one behind the other, so that
    it is as long as its tokens are and not as its rows. With e what was not sampled,

    rows   e0: [a a . .]   e1: [b b b .]   e0: [c c e c]     ->     episodes   [a a c c c]   [b b b . .]

    Attributes:
        rows: for each episode its row numbers, in the order of `episode_row`.
        first: (E,) int64, each episode's first row.
        real: (B,) bool, False for dummy rows.
        one_row_each: whether the episodes are the batch's rows.
    """

    def __init__(self, batch: DataProto) -> None:
        columns, self.real, self._batch = batch.non_tensor_batch, real_rows(batch), batch
        ids = columns.get("episode_id", np.arange(len(batch)))
        order = columns.get("episode_row", np.zeros(len(batch), dtype=np.int64))
        rows_of = rows_by_key(str(ids[row]) if self.real[row] else row for row in range(len(batch)))
        self.rows = sorted(sorted(rows, key=order.__getitem__) for rows in rows_of.values())
        self.first = np.array([rows[0] for rows in self.rows], dtype=np.int64)
        self.one_row_each = all(rows == [i] for i, rows in enumerate(self.rows))
        owner = {row: episode for episode, rows in enumerate(self.rows) for row in rows}
        self._episode_of_row = torch.tensor([owner[row] for row in range(len(batch))], dtype=torch.int64)

    def takes(self, tensor: Tensor, width: int) -> bool:
        """Tells whether `join` takes the tensor: (B,), (B, width), or any where each episode has one row."""
        return self.one_row_each or tensor.shape[1:] in ((), (width,))

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns row and column of every sampled token, in the order of lines, and its place among all the lines'."""
        order = torch.tensor([row for rows in self.rows for row in rows])
        rows, columns = self._batch.batch["response_mask"][order].bool().nonzero(as_tuple=True)
        lines = self._episode_of_row[order][rows]
        starts = self.lengths.cumsum(0) - self.lengths
        return order[rows], columns, lines * self._width + torch.arange(len(rows)) - starts[lines]

    @cached_property
    def _width(self) -> int:
        """Counts the sampled tokens of the longest episode, one at least."""
        return max(int(self.lengths.max()), 1)

    @cached_property
    def lengths(self) -> Tensor:
        """Counts each episode's sampled tokens: (E,) int64."""
        tokens = row_sums(self._batch.batch["response_mask"]).long()
        return tokens.new_zeros(len(self.rows)).index_add(0, self._episode_of_row, tokens)

    def join(self, tensor: Tensor) -> Tensor:
        """Makes lines of sampled tokens: (B, R) -> (E, tokens of the longest); (B,) -> the first row's."""
        if self.one_row_each:
            return tensor
        if tensor.dim() == 1:
            return tensor[torch.from_numpy(self.first)]
        rows, columns, places = self._places
        joined = tensor.new_zeros(len(self.rows), self._width)
        joined.view(-1)[places] = tensor[rows, columns]
        return joined

    def split(self, joined: Tensor) -> Tensor:
        """Undoes `join` for lines: (B, R), zero where nothing was sampled."""
        if self.one_row_each:
            return joined
        rows, columns, places = self._places
        out = joined.new_zeros(self._batch.batch["response_mask"].shape)
        out[rows, columns] = joined.reshape(-1)[places]
        return out

    def totals(self, tensor: Tensor) -> Tensor:
        """Sums each episode's sampled tokens, without lines: (B, R) -> (E,) float64."""
        sums = sampled_sums(tensor, self._batch.batch["response_mask"])
        return sums.new_zeros(len(self.rows)).index_add(0, self._episode_of_row, sums)

    def as_scores(self) -> DataProto:
        """Makes a batch of one row an episode, in which one place has its rewards, and its mask counts its tokens."""
        columns = {name: values[self.first] for name, values in self._batch.non_tensor_batch.items()}
        rewards = self.totals(self._batch.batch["token_level_rewards"])[:, None]
        tensors = {"token_level_rewards": rewards, "response_mask": self.lengths[:, None]}
        return DataProto.from_dict(tensors=tensors, non_tensors=columns)

    def parts(self, keys: Sequence[Any]) -> list[list[int]]:
        """Cuts the rows (B) into parts whose lines are about as long, so that these cost what their tokens do.

        Episodes of one key (E) stay together; of the longest episodes of the keys in a part, none is twice as long as
        another.
        """
        longest: dict[Any, int] = {}
        for key, length in zip(keys, self.lengths.tolist(), strict=True):
            longest[key] = max(longest.get(key, 0), length)
        return list(rows_by_key(longest[keys[owner]].bit_length() for owner in self._episode_of_row.tolist()).values())

    def of_rows(self, per_episode: Tensor) -> Tensor:
        """Gives every row its episode's number: (E,) -> (B,)."""
        return per_episode[self._episode_of_row]

    def shares(self) -> Tensor | None:
        """Computes which share of its episode's sampled tokens each row has, (B,) float32; None where each has all."""
        if self.one_row_each:
            return None
        tokens = row_sums(self._batch.batch["response_mask"]).float()
        return tokens / self.of_rows(self.lengths).clamp(min=1)

    def fold(self, per_row: Tensor, how: Literal["sum", "amax", "amin"] = "sum") -> Tensor:
        """Reduces (B,) over each episode's rows, dummies left out: (real episodes,) float64."""
        values, episodes = per_row[self.real].double(), self._episode_of_row[self.real]
        found, numbers = episodes.unique(return_inverse=True)
        return values.new_zeros(len(found)).scatter_reduce(0, numbers, values, how, include_self=False)
