"""How a batch is cut: partitions of equal work, the order of rows on ranks, and micro-batches within a token budget.

Invariant: every row appears exactly once, and the same input gives the same plan.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice, pairwise
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from training.config import BatchPlan, MicroBatching

Key = TypeVar("Key", bound=Hashable)


def ceildiv(a: int, b: int) -> int:
    """Divides a by b and rounds up."""
    return -(-a // b)


def roundup_divisible(a: int, divisor: int) -> int:
    """Returns the smallest multiple of `divisor` that is not below `a`."""
    return ceildiv(a, divisor) * divisor


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partitions indices into k lists whose sums of lengths are nearly equal, by Karmarkar and Karp's differencing.

    With `equal_size` every list has the same number of indices. `get_seqlen_balanced_partitions` checks its arguments.
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (-seqlen_list[i], i))
    step = k_partitions if equal_size else 1
    # A partial solution is k bins (sum, rows), largest first; the heap yields the one with the widest spread.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), step)):
        bins = [(seqlen_list[i], [i]) for i in order[start : start + step]]
        bins += [(0, []) for _ in range(k_partitions - len(bins))]
        heap.append((bins[-1][0] - bins[0][0], number, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        bins = [(a + b, rows + others) for (a, rows), (b, others) in zip(first, reversed(second), strict=True)]
        bins.sort(key=lambda part: (-part[0], -len(part[1])))
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], number, bins))
    return [rows for _, rows in heap[0][2]]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Partitions rows into k non-empty lists, each ascending, with nearly equal sums of lengths.

    Raises: ValueError if there are fewer rows than partitions, or with `equal_size` if k does not divide their number.
    """
    rows = len(seqlen_list)
    if not 1 <= k_partitions <= rows:
        raise ValueError(f"cannot cut {rows} rows into {k_partitions} non-empty partitions")
    if equal_size and rows % k_partitions:
        raise ValueError(f"equal_size: {rows} rows do not divide into {k_partitions} partitions; pad the batch first")
    return sorted(sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size))


def arrange(batch: DataProto, plan: BatchPlan) -> DataProto:
    """Orders rows for the ranks, each of which gets a consecutive chunk that holds its share of every part in turn.

    A part has its prompts' rows, on any number of ranks, and dummy rows where another part has more (episodes may
    have several rows) or the ranks do not divide them. A group's rows stay on one rank as far as they fit, because
    there they share their prompt.
    """
    parts = rows_of_parts(list(batch.non_tensor_batch["uid"]), plan.parts)
    size = roundup_divisible(max(sum(map(len, groups)) for groups in parts), plan.ranks)
    as_they_are = [row for groups in parts for group in groups for row in group] == [*range(len(batch))]
    if plan.ranks == 1 and as_they_are and len(parts) * size == len(batch):
        return batch
    spare = iter(range(len(batch), len(parts) * size))
    lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
    # A dummy is as long as row 0, which it copies.
    lengths += [lengths[0]] * (len(parts) * size - len(batch))
    rows_of_rank: list[list[int]] = [[] for _ in range(plan.ranks)]
    for groups in parts:
        dummies = [[row] for row in islice(spare, size - sum(map(len, groups)))]
        for rank, share in enumerate(_shares([*groups, *dummies], lengths, plan)):
            rows_of_rank[rank] += share
    return batch.select_or_dummies([row for rows in rows_of_rank for row in rows])


def _shares(groups: list[list[int]], lengths: Sequence[int], plan: BatchPlan) -> list[list[int]]:
    """Shares groups out among the ranks, as many rows for each; in order, or balanced by their tokens."""
    rows = [row for group in groups for row in group]
    if not plan.balance:
        return [list(share) for share in np.array_split(rows, plan.ranks)]
    if len({len(group) for group in groups}) == 1 and len(groups) % plan.ranks == 0:
        tokens = [sum(lengths[row] for row in group) for group in groups]
        balanced = get_seqlen_balanced_partitions(tokens, plan.ranks, equal_size=True)
        return [[row for i in share for row in groups[i]] for share in balanced]
    shares: list[list[int]] = [[] for _ in range(plan.ranks)]
    taken, room = [0] * plan.ranks, len(rows) // plan.ranks
    # The largest first, each to the rank with the fewest tokens that it fits into; what fits nowhere is taken apart.
    waiting = deque(sorted(groups, key=lambda group: -sum(lengths[row] for row in group)))
    while waiting:
        group = waiting.popleft()
        fitting = [rank for rank in range(plan.ranks) if len(shares[rank]) + len(group) <= room]
        if fitting:
            rank = min(fitting, key=taken.__getitem__)
            shares[rank] += group
            taken[rank] += sum(lengths[row] for row in group)
        else:
            waiting += [group[: len(group) // 2], group[len(group) // 2 :]]
    return [sorted(share) for share in shares]


def rows_of_parts(uids: Sequence[Hashable], count: int) -> list[list[list[int]]]:
    """Lists each of `count` parts' groups of rows: in order of appearance, as many in each part, or one more."""
    groups = list(rows_by_key(uids).values())
    return [[groups[i] for i in part] for part in np.array_split(np.arange(len(groups)), count)]


def shuffled_groups(uids: Sequence[Hashable], generator: torch.Generator) -> Tensor:
    """Draws an order of rows that permutes groups and keeps the rows of a group together, in their own order.

    Depends on the grouping and the generator's state alone, not on what the uids are: (rows,) int64.
    """
    groups = list(rows_by_key(uids).values())
    order = torch.randperm(len(groups), generator=generator).tolist()
    return torch.tensor([row for group in order for row in groups[group]], dtype=torch.int64)


def plan_padded(lengths: Sequence[int], limits: MicroBatching) -> list[list[int]]:
    """Cuts rows into the fewest micro-batches, and among those the least padded ones; the most padded comes first.

    Rows of 18 and 16 tokens in a budget of 40: one micro-batch of 2 x 18 = 36, which is what counts. A row larger than
    the budget is a micro-batch of its own.

    Shortest path over the places where rows, longest first, are cut.
    """
    rows = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    most_rows = limits.micro_batch_size or len(rows)
    one_more_batch = 1 + sum(lengths) * (len(rows) + 1)
    # For each number of rows the least cost of cutting so many, and where their last micro-batch starts.
    best = [(0, 0)]
    for end in range(1, len(rows) + 1):
        options = []
        for start in reversed(range(end)):
            padded = (end - start) * lengths[rows[start]]
            too_large = end - start > most_rows or (limits.max_token_len is not None and padded > limits.max_token_len)
            # A single row is always allowed; further starts only grow.
            if too_large and start < end - 1:
                break
            options.append((best[start][0] + one_more_batch + padded, start))
        best.append(min(options, key=itemgetter(0)))
    cuts = [len(rows)]
    while cuts[-1] > 0:
        cuts.append(best[cuts[-1]][1])
    # The largest comes first: what smaller ones allocate fits into what it freed, so memory does not grow in pieces.
    spans = sorted(pairwise(reversed(cuts)), key=lambda span: best[span[0]][0] - best[span[1]][0])
    return [rows[start:end] for start, end in spans]


def rows_by_key(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Lists the row numbers of each key, keys in order of appearance."""
    groups: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return groups
