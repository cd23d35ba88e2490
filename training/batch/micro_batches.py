"""Cuts a rank's rows into micro-batches and puts results back in order.

A micro-batch is limited by a token budget or by a number of rows.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from data.protocol import DataProto
from training.batch.rank_layout import ceildiv, get_seqlen_balanced_partitions
from training.config import MicroBatching


class Cut(NamedTuple):
    """Describes the best cut of the longest rows: its cost, and where its last batch starts."""

    cost: int
    last_start: int


def plan_padded(lengths: Sequence[int], limits: MicroBatching) -> list[list[int]]:
    """Cuts rows into the fewest micro-batches, and among those cuts takes the least padded one.

    Rows of 18 and 16 tokens in a budget of 40 make one micro-batch of 2 x 18 = 36, which is what
    counts. A row larger than the budget is a micro-batch of its own. The most padded micro-batch
    comes first: what smaller ones allocate fits into what it freed, so memory does not grow in
    pieces.

    This is a shortest path over the places where rows, longest first, are cut.
    """
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    sorted_lengths = [lengths[row] for row in rows]
    # More than any amount of padding can cost.
    cost_of_a_batch = 1 + sum(lengths) * (len(rows) + 1)
    best = [Cut(cost=0, last_start=0)]
    for end in range(1, len(rows) + 1):
        best.append(_best_cut(end, best, sorted_lengths, limits, cost_of_a_batch))
    ends = [len(rows)]
    while ends[-1] > 0:
        ends.append(best[ends[-1]].last_start)
    spans = list(pairwise(reversed(ends)))
    spans.sort(key=lambda span: best[span[0]].cost - best[span[1]].cost)
    return [rows[start:end] for start, end in spans]


def _best_cut(
    end: int, best: list[Cut], lengths: list[int], limits: MicroBatching, cost_of_a_batch: int
) -> Cut:
    """Finds where the last micro-batch of the `end` longest rows starts at the least cost."""
    most_rows = limits.micro_batch_size or len(lengths)
    options = []
    for start in reversed(range(end)):
        padded_tokens = (end - start) * lengths[start]
        too_many_rows = end - start > most_rows
        too_many_tokens = limits.max_token_len is not None and padded_tokens > limits.max_token_len
        is_single_row = start == end - 1
        # A single row is always allowed; earlier starts only grow.
        if (too_many_rows or too_many_tokens) and not is_single_row:
            break
        cost = best[start].cost + cost_of_a_batch + padded_tokens
        options.append(Cut(cost=cost, last_start=start))
    return min(options, key=lambda cut: cut.cost)


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: Any = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
) -> tuple[list[TensorDict], list[list[int]]]:
    """Cuts a batch into micro-batches of at most `max_token_len` unpadded tokens.

    Args:
        batch: with attention_mask (batch, length).
        dp_group: process group whose ranks agree on the largest number of micro-batches, if
            `same_micro_num_in_dp`.
        min_num_micro_batch: at least this many.
    Returns:
        the micro-batches and the row numbers of each.
    Raises:
        ValueError: one row exceeds the budget.
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    if max(lengths) > max_token_len:
        raise ValueError(
            f"a row has {max(lengths)} tokens, above max_token_len={max_token_len}; "
            "raise the budget"
        )
    count = max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1)
    count = min(count, len(lengths))
    partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    while _most_tokens(partitions, lengths) > max_token_len:
        count += 1
        partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    if dp_group is not None and same_micro_num_in_dp:
        agreed = torch.tensor([len(partitions)], device=batch["attention_mask"].device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
        partitions = get_seqlen_balanced_partitions(lengths, int(agreed), equal_size=False)
    return [batch[torch.tensor(rows)] for rows in partitions], partitions


def _most_tokens(partitions: list[list[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[row] for row in rows) for rows in partitions)


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int
) -> tuple[list[DataProto], list[list[int]]]:
    """Cuts a DataProto as `rearrange_micro_batches` does.

    Returns: the micro-batches and the row numbers of each.
    """
    _, partitions = rearrange_micro_batches(data.batch, max_token_len)
    return [data.select_idxs(rows) for rows in partitions], partitions


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Puts results of concatenated micro-batches (rows, ...) back into the order of the batch."""
    return data[get_reverse_idx(list(chain.from_iterable(batch_idx_list)))]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Inverts a permutation."""
    return np.argsort(np.asarray(idx_map, dtype=np.int64), kind="stable").tolist()
