"""Lays the rows of a step out over ranks and mini-batches, balanced by their tokens.

Invariant: every row appears exactly once, and the same input gives the same layout.
"""

import heapq
from collections import deque
from collections.abc import Sequence

import numpy as np

from data.protocol import DataProto
from training.batch.row_groups import rows_of_parts
from training.config import BatchPlan

# Indices of one partition and the sum of their lengths.
Bin = tuple[int, list[int]]


def ceildiv(a: int, b: int) -> int:
    """Divides a by b and rounds up."""
    return -(-a // b)


def roundup_divisible(a: int, divisor: int) -> int:
    """Returns the smallest multiple of `divisor` that is not below `a`."""
    return ceildiv(a, divisor) * divisor


def karmarkar_karp(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partitions indices into k lists whose sums of lengths are nearly equal.

    The method is Karmarkar and Karp's differencing. With `equal_size` every list has the same
    number of indices. `get_seqlen_balanced_partitions` checks its arguments.
    """
    order = sorted(range(len(seqlen_list)), key=lambda i: (-seqlen_list[i], i))
    step = k_partitions if equal_size else 1
    # A partial solution is k bins, largest first; the heap yields the one with the widest spread,
    # and of several the one that was made first.
    heap: list[tuple[int, int, list[Bin]]] = []
    for number, start in enumerate(range(0, len(order), step)):
        bins: list[Bin] = [(seqlen_list[i], [i]) for i in order[start : start + step]]
        while len(bins) < k_partitions:
            bins.append((0, []))
        heap.append((_negative_spread(bins), number, bins))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge_bins(first, second)
        heapq.heappush(heap, (_negative_spread(merged), number, merged))
    (_, _, bins) = heap[0]
    return [rows for _, rows in bins]


def _negative_spread(bins: list[Bin]) -> int:
    """Computes smallest minus largest sum of bins that are sorted, largest first."""
    return bins[-1][0] - bins[0][0]


def _merge_bins(first: list[Bin], second: list[Bin]) -> list[Bin]:
    """Joins the largest bins of one solution with the smallest of the other; largest first."""
    merged = []
    for (sum_a, rows_a), (sum_b, rows_b) in zip(first, reversed(second), strict=True):
        merged.append((sum_a + sum_b, rows_a + rows_b))
    return sorted(merged, key=lambda entry: (-entry[0], -len(entry[1])))


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partitions rows into k non-empty lists, each ascending, with nearly equal sums of lengths.

    Raises:
        ValueError: there are fewer rows than partitions, or `equal_size` and k does not divide
            their number.
    """
    rows = len(seqlen_list)
    if not 1 <= k_partitions <= rows:
        raise ValueError(f"cannot cut {rows} rows into {k_partitions} non-empty partitions")
    if equal_size and rows % k_partitions:
        raise ValueError(
            f"equal_size: {rows} rows do not divide into {k_partitions} partitions; "
            "pad the batch first"
        )
    partitions = karmarkar_karp(seqlen_list, k_partitions, equal_size)
    return sorted(sorted(partition) for partition in partitions)


def arrange(batch: DataProto, plan: BatchPlan) -> DataProto:
    """Orders rows for the ranks: each gets a chunk that holds its share of every part in turn.

    A part has its prompts' rows, on any number of ranks, and dummy rows where another part has
    more (episodes may have several rows) or the ranks do not divide them. A group's rows stay on
    one rank as far as they fit, because there they share their prompt.
    """
    rows = len(batch)
    parts = rows_of_parts(list(batch.non_tensor_batch["uid"]), plan.parts)
    largest = max(sum(map(len, groups)) for groups in parts)
    rows_per_part = roundup_divisible(largest, plan.ranks)
    padded_rows = len(parts) * rows_per_part
    if plan.ranks == 1 and padded_rows == rows and _in_order(parts):
        return batch
    lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
    # A dummy is as long as row 0, which it copies.
    lengths += [lengths[0]] * (padded_rows - rows)
    rows_of_rank: list[list[int]] = [[] for _ in range(plan.ranks)]
    next_dummy = rows
    for groups in parts:
        missing = rows_per_part - sum(map(len, groups))
        dummies = [[next_dummy + i] for i in range(missing)]
        next_dummy += missing
        shares = _share_among_ranks([*groups, *dummies], lengths, plan)
        for rank, share in enumerate(shares):
            rows_of_rank[rank] += share
    order: list[int] = []
    for rank_rows in rows_of_rank:
        order.extend(rank_rows)
    return batch.select_or_dummies(order)


def _in_order(parts: list[list[list[int]]]) -> bool:
    """Checks whether the rows of all parts, in turn, are 0, 1, 2, …"""
    rows: list[int] = []
    for groups in parts:
        for group in groups:
            rows.extend(group)
    return rows == list(range(len(rows)))


def _share_among_ranks(
    groups: list[list[int]], lengths: Sequence[int], plan: BatchPlan
) -> list[list[int]]:
    """Shares groups out among the ranks, as many rows for each; in order, or balanced by tokens."""
    if not plan.balance:
        rows = [row for group in groups for row in group]
        return [list(share) for share in np.array_split(rows, plan.ranks)]
    sizes = {len(group) for group in groups}
    if len(sizes) == 1 and len(groups) % plan.ranks == 0:
        return _balance_equal_groups(groups, lengths, plan.ranks)
    return _balance_unequal_groups(groups, lengths, plan.ranks)


def _count_tokens(rows: list[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)


def _balance_equal_groups(
    groups: list[list[int]], lengths: Sequence[int], ranks: int
) -> list[list[int]]:
    """Gives each rank the same number of groups of one size, whole, balanced by their tokens."""
    tokens = [_count_tokens(group, lengths) for group in groups]
    shares = []
    for numbers in get_seqlen_balanced_partitions(tokens, ranks, equal_size=True):
        shares.append([row for number in numbers for row in groups[number]])
    return shares


def _balance_unequal_groups(
    groups: list[list[int]], lengths: Sequence[int], ranks: int
) -> list[list[int]]:
    """Gives groups, largest first, to the rank with the fewest tokens that has room for them.

    A group that fits nowhere is halved.
    """
    room = sum(map(len, groups)) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens_of_rank = [0] * ranks
    largest_first = sorted(groups, key=lambda g: _count_tokens(g, lengths), reverse=True)
    waiting = deque(largest_first)
    while waiting:
        group = waiting.popleft()
        fitting = [rank for rank in range(ranks) if len(shares[rank]) + len(group) <= room]
        if fitting:
            rank = min(fitting, key=tokens_of_rank.__getitem__)
            shares[rank] += group
            tokens_of_rank[rank] += _count_tokens(group, lengths)
        else:
            half = len(group) // 2
            waiting.append(group[:half])
            waiting.append(group[half:])
    return [sorted(share) for share in shares]


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Counts tokens per partition, before balancing (contiguous rows) and after.

    Returns: metrics `prefix/min`, `max`, `minmax_diff`, `mean`, `balanced_min`, `balanced_max`.
    """
    lengths = np.asarray(seqlen_list)
    before = [rows.sum() for rows in np.array_split(lengths, len(partitions))]
    after = [lengths[list(rows)].sum() for rows in partitions]
    return {
        f"{prefix}/min": float(min(before)),
        f"{prefix}/max": float(max(before)),
        f"{prefix}/minmax_diff": float(max(before) - min(before)),
        f"{prefix}/mean": float(np.mean(before)),
        f"{prefix}/balanced_min": float(min(after)),
        f"{prefix}/balanced_max": float(max(after)),
    }
