"""Lays rows of tokens out as the batches that updates take.

    row       ids  a b c d e     mask  0 0 1 0 1
    batch     prompts  _ a b     responses  c d e _     response_mask  1 0 1 0

A row's prompt ends before its first learnt token. Invariant: equal rows give equal batches, and a
batch is as wide as its rows need.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from data.array_ops import object_array
from data.epoch_order import EpochOrder
from data.protocol import DataProto
from features.sft.turns import TrainedRow


def batch_of(rows: Sequence[TrainedRow], pad_id: int) -> DataProto:
    """Lays rows out: prompts (B, P), responses and response_mask (B, R), attention_mask, and uid.

    Args:
        rows: each with a learnt token that is not its first.
    """
    begins = [row.mask.index(1) for row in rows]
    width = max(begins)
    length = max(len(row.ids) - begin for row, begin in zip(rows, begins, strict=True))
    ids = np.full((len(rows), width + length), pad_id, np.int32)
    mask = np.zeros((len(rows), width + length), np.int8)
    attention = np.zeros((len(rows), width + length), np.int8)
    for number, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        place = slice(width - begin, width - begin + len(row.ids))
        ids[number, place] = row.ids
        mask[number, place] = row.mask
        attention[number, place] = 1
    tensors = {
        "prompts": torch.from_numpy(ids[:, :width].copy()),
        "responses": torch.from_numpy(ids[:, width:].copy()),
        "response_mask": torch.from_numpy(mask[:, width:].copy()),
        "attention_mask": torch.from_numpy(attention),
    }
    uids = object_array([f"sft.{number}" for number in range(len(rows))])
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


def rows_of_update(order: EpochOrder, size: int, update: int) -> list[int]:
    """Returns the numbers of the rows that an update of a run learns.

    They follow from the update's number alone, so that nothing of them is kept in checkpoints: the
    updates go through the rows in the order of an epoch, then in that of the next.

    Args:
        update: from 0 on.
    """
    rows: list[int] = []
    epoch, place = divmod(update * size, order.num_rows)
    while len(rows) < size:
        order.start(epoch, place)
        rows += list(order)[: size - len(rows)]
        epoch, place = epoch + 1, 0
    return rows
