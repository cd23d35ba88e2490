"""How a batch is cut: partitions of equal work, the order of rows on ranks, and micro-batches within a token budget.

Invariant: every row appears exactly once, and the same input gives the same plan.
"""

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, islice, pairwise

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from training.config import BatchPlan

# A shared-prefix group: rows of one identical prompt, which is computed once for all their responses.
PrefixGroup = list[int]
MicroBatch = list[PrefixGroup]


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
        bins = [(a + b, _joined(rows, others)) for (a, rows), (b, others) in zip(first, reversed(second), strict=True)]
        bins.sort(key=lambda part: (-part[0], -len(part[1])))
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], number, bins))
    return [rows for _, rows in heap[0][2]]


def _joined(rows: list[int], others: list[int]) -> list[int]:
    """Extends the longer list by the shorter, so that all merges together cost n log n."""
    longer, shorter = (rows, others) if len(rows) >= len(others) else (others, rows)
    longer.extend(shorter)
    return longer


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

    A part has its prompts' rows, on any number of ranks, and dummy rows where another part has more (episodes may have
    several rows) or the ranks do not divide them.
    """
    parts = rows_of_parts(list(batch.non_tensor_batch["uid"]), plan.parts)
    size = roundup_divisible(max(map(len, parts)), plan.ranks)
    if plan.ranks == 1 and all(len(rows) == size for rows in parts):
        return batch
    spare = iter(range(len(batch), len(parts) * size))
    parts = [[*rows, *islice(spare, size - len(rows))] for rows in parts]
    batch = batch.pad_with_dummies(len(parts) * size)
    lengths = batch.batch["attention_mask"].sum(dim=1).tolist()
    rows_of_rank: list[list[int]] = [[] for _ in range(plan.ranks)]
    for rows in parts:
        if plan.balance:
            shares = get_seqlen_balanced_partitions([lengths[row] for row in rows], plan.ranks, equal_size=True)
        else:
            shares = [list(share) for share in np.array_split(np.arange(size), plan.ranks)]
        for rank, share in enumerate(shares):
            rows_of_rank[rank] += [rows[k] for k in share]
    return batch.select_idxs(torch.tensor([row for rows in rows_of_rank for row in rows]))


def rows_of_parts(uids: Sequence[Hashable], count: int) -> list[list[int]]:
    """Lists the rows of each of `count` parts: groups in order of appearance, as many in each, or one more."""
    groups = list(_rows_by_key(uids).values())
    parts = np.array_split(np.arange(len(groups)), count)
    return [list(chain.from_iterable(groups[i] for i in part)) for part in parts]


def shuffled_groups(uids: Sequence[Hashable], generator: torch.Generator) -> Tensor:
    """Draws an order of rows that permutes groups and keeps the rows of a group together, in their own order.

    Depends on the grouping and the generator's state alone, not on what the uids are: (rows,) int64.
    """
    groups = list(_rows_by_key(uids).values())
    order = torch.randperm(len(groups), generator=generator).tolist()
    return torch.tensor([row for group in order for row in groups[group]], dtype=torch.int64)


def plan_micro_batches(
    prompt_keys: Sequence[Hashable],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    *,
    max_token_len: int | None,
    micro_batch_size: int | None,
    share_prompts: bool,
    max_group_tokens: int,
    pack_rows: bool = False,
) -> list[MicroBatch]:
    """Cuts rows into few micro-batches with little padding; the one of most padded tokens comes first.

    Two prompts of 10 tokens, responses of 5, 3 and 6, a budget of 40:

        keys a a b  ->  groups [0, 1] of 10 + 5 + 3 = 18 tokens, [2] of 10 + 6 = 16  ->  one micro-batch of 2 x 18 = 36

    Args:
        prompt_keys: rows with equal keys have the identical prompt.
        prompt_lengths, response_lengths: tokens of each row.
        max_token_len: budget of a micro-batch in padded tokens: groups x the longest of them. Or, instead,
        micro_batch_size: rows of a micro-batch, at most.
        share_prompts: whether rows of one key form groups; else every row is its own.
        max_group_tokens: larger groups are split evenly, each part with the prompt again, since a dense attention mask
            grows with the square of its tokens.
        pack_rows: whether a micro-batch of single rows has no padding, so that it counts the sum of their tokens.
    Returns:
        micro-batches of groups of row numbers. A row larger than a limit is a group, and a micro-batch, of its own.
    Raises: ValueError unless exactly one of the two limits is given, or for rows that share a key but not a length.
    """
    if (max_token_len is None) == (micro_batch_size is None):
        raise ValueError(
            "give exactly one of a token budget (use_dynamic_bsz) and a micro-batch size; "
            f"given: max_token_len={max_token_len}, micro_batch_size={micro_batch_size}"
        )
    if not len(prompt_keys) == len(prompt_lengths) == len(response_lengths):
        raise ValueError("prompt_keys, prompt_lengths and response_lengths need one entry per row")
    max_rows = len(prompt_keys) if micro_batch_size is None else micro_batch_size
    capacity = max_group_tokens if max_token_len is None else min(max_group_tokens, max_token_len)
    rows_of_key = _rows_by_key(prompt_keys if share_prompts else range(len(prompt_keys)))
    groups: list[tuple[int, PrefixGroup]] = []  # (tokens, rows)
    for key, rows in rows_of_key.items():
        prompt = prompt_lengths[rows[0]]
        if any(prompt_lengths[row] != prompt for row in rows):
            raise ValueError(f"rows {rows} share the prompt key {key!r} but not the prompt's length")
        for group in _split_evenly(rows, response_lengths, capacity - prompt, max_rows):
            groups.append((prompt + sum(response_lengths[row] for row in group), group))
    groups.sort(key=lambda group: (-group[0], group[1]))
    return _cut_sorted_groups(groups, max_token_len, max_rows, pack_rows)


def _rows_by_key(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Lists the row numbers of each key, keys in order of appearance."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return groups


def _split_evenly(rows: list[int], lengths: Sequence[int], capacity: int, max_rows: int) -> list[PrefixGroup]:
    """Splits rows over the fewest bins that hold them, each row into the emptiest; one above capacity has its own."""
    fitting = sorted((row for row in rows if lengths[row] <= capacity), key=lambda row: (-lengths[row], row))
    own = [[row] for row in rows if lengths[row] > capacity]
    if not fitting:
        return own
    total = sum(lengths[row] for row in fitting)
    fewest = max(ceildiv(total, capacity) if capacity > 0 else 1, ceildiv(len(fitting), max_rows))
    for count in range(fewest, len(fitting) + 1):
        bins: list[tuple[int, PrefixGroup]] = [(0, []) for _ in range(count)]
        for row in fitting:
            open_bins = [b for b in range(count) if len(bins[b][1]) < max_rows]
            emptiest = min(open_bins, key=lambda b: bins[b][0])
            bins[emptiest] = (bins[emptiest][0] + lengths[row], [*bins[emptiest][1], row])
        if all(tokens <= capacity for tokens, _ in bins):
            break
    return own + [sorted(group) for _, group in bins if group]


def _cut_sorted_groups(
    groups: Sequence[tuple[int, PrefixGroup]], max_token_len: int | None, max_rows: int, pack_rows: bool
) -> list[MicroBatch]:
    """Cuts groups, longest first, into the fewest consecutive micro-batches, and among those the least padded ones.

    Shortest path over cut positions; a micro-batch that starts with a group of t tokens costs t for each of its groups,
    or, packed, its tokens.
    """
    one_more_batch = 1 + sum(tokens for tokens, _ in groups) * (len(groups) + 1)
    cost: list[float] = [0]
    start_of = [0]
    for end in range(1, len(groups) + 1):
        best, best_start, rows, unpadded = math.inf, end - 1, 0, 0
        for start in reversed(range(end)):
            tokens, group = groups[start]
            rows, unpadded = rows + len(group), unpadded + tokens
            packed = pack_rows and rows == end - start
            padded = unpadded if packed else (end - start) * tokens
            too_large = rows > max_rows or (max_token_len is not None and padded > max_token_len)
            # A single group is always allowed; further starts only grow.
            if too_large and start < end - 1:
                break
            if cost[start] + one_more_batch + padded < best:
                best, best_start = cost[start] + one_more_batch + padded, start
        cost.append(best)
        start_of.append(best_start)
    cuts = [len(groups)]
    while cuts[-1] > 0:
        cuts.append(start_of[cuts[-1]])
    # The largest comes first: what smaller ones allocate fits into what it freed, so memory does not grow in pieces.
    spans = sorted(pairwise(reversed(cuts)), key=lambda span: cost[span[0]] - cost[span[1]])
    return [[group for _, group in groups[start:end]] for start, end in spans]
