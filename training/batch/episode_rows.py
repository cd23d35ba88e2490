"""Which rows of a batch belong to one episode, and the way from rows to episodes and back.

Estimators, filters and metrics see episodes, so that one counts once however many rows it has, and its rewards reach
back over all of them. Invariant: dummy rows, which only pad a batch to the ranks, are an episode each, and enter no
average.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.protocol import DUMMY_UID, DataProto


def real_rows(batch: DataProto) -> Tensor:
    """Returns (B,) bool: False for dummy rows."""
    if "uid" not in batch.non_tensor_batch:
        return torch.ones(len(batch), dtype=torch.bool)
    return torch.from_numpy(batch.non_tensor_batch["uid"].astype(object) != DUMMY_UID)


class EpisodeRows:
    """Groups a batch's rows (B) by `episode_id` into E episodes, in the order of their first rows.

    rows   e0: [a a . .]   e1: [b b b .]   e0: [c c e c]     ->     episodes   [a a . . c c e c]   [b b b . . . . .]

    Attributes:
        rows: for each episode its row numbers, in the order of `episode_row`.
        first: (E,) int64, each episode's first row.
        real: (B,) bool, False for dummy rows.
    """

    def __init__(self, batch: DataProto) -> None:
        rows_of: dict[Hashable, list[int]] = {}
        columns, real = batch.non_tensor_batch, real_rows(batch)
        ids = columns.get("episode_id", np.arange(len(batch)))
        order = columns.get("episode_row", np.zeros(len(batch), dtype=np.int64))
        for row in np.argsort(order, kind="stable").tolist():
            rows_of.setdefault(str(ids[row]) if real[row] else row, []).append(row)
        self.rows = sorted(rows_of.values())
        self.first = np.array([rows[0] for rows in self.rows], dtype=np.int64)
        self._one_row_each = all(rows == [i] for i, rows in enumerate(self.rows))
        self.real = real
        owner = {row: episode for episode, rows in enumerate(self.rows) for row in rows}
        self._episode_of_row = torch.tensor([owner[row] for row in range(len(batch))], dtype=torch.int64)

    def takes(self, tensor: Tensor, width: int) -> bool:
        """Tells whether `join` takes the tensor: (B,), (B, width), or any where each episode has one row."""
        return self._one_row_each or tensor.shape[1:] in ((), (width,))

    def join(self, tensor: Tensor) -> Tensor:
        """Puts an episode's rows one behind the other: (B, R) -> (E, most rows of one x R); (B,) -> the first row's."""
        if self._one_row_each:
            return tensor
        if tensor.dim() == 1:
            return tensor[torch.from_numpy(self.first)]
        width = tensor.shape[1]
        joined = tensor.new_zeros(len(self.rows), max(map(len, self.rows)) * width)
        for episode, rows in zip(joined, self.rows, strict=True):
            episode[: len(rows) * width] = tensor[rows].flatten()
        return joined

    def split(self, joined: Tensor) -> Tensor:
        """Undoes `join` for (E, most rows of one x R): (B, R)."""
        if self._one_row_each:
            return joined
        width = joined.shape[1] // max(map(len, self.rows))
        out = joined.new_empty(sum(map(len, self.rows)), width)
        for episode, rows in zip(joined, self.rows, strict=True):
            out[rows] = episode[: len(rows) * width].view(len(rows), width)
        return out

    def fold(self, per_row: Tensor, how: Literal["sum", "amax", "amin"] = "sum") -> Tensor:
        """Reduces (B,) over each episode's rows, dummies left out: (real episodes,) float64."""
        values, episodes = per_row[self.real].double(), self._episode_of_row[self.real]
        numbers = episodes.unique(return_inverse=True)[1]
        out = values.new_zeros(int(numbers.max()) + 1 if len(numbers) else 0)
        return out.scatter_reduce(0, numbers, values, how, include_self=False)
