"""How a batch is cut: mini-batches, micro-batches within a token budget, and partitions of equal work.

Invariant: every row appears exactly once, and the same input gives the same plan.
"""

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from data.protocol import DataProto

Tree = list[int]  # rows that share one identical prompt: it is computed once, with one branch per response
MicroBatch = list[Tree]


def ceildiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def roundup_divisible(a: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is not below `a`."""
    return ceildiv(a, divisor) * divisor


# Partitions of equal sums


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Karmarkar and Karp's largest differencing method: k lists of indices whose sums of lengths are nearly equal.

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
    """k non-empty lists of row numbers, each ascending, with nearly equal sums of lengths.

    Raises: ValueError if there are fewer rows than partitions, or with `equal_size` if k does not divide their number.
    """
    rows = len(seqlen_list)
    if not 1 <= k_partitions <= rows:
        raise ValueError(f"cannot cut {rows} rows into {k_partitions} non-empty partitions")
    if equal_size and rows % k_partitions:
        raise ValueError(f"equal_size: {rows} rows do not divide into {k_partitions} partitions; pad the batch first")
    return sorted(sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size))


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Tokens per partition, before balancing (contiguous rows) and after, as metrics `prefix/...`."""
    lengths = np.asarray(seqlen_list)
    before = [part.sum() for part in np.array_split(lengths, len(partitions))]
    after = [lengths[list(part)].sum() for part in partitions]
    return {
        f"{prefix}/min": float(min(before)),
        f"{prefix}/max": float(max(before)),
        f"{prefix}/minmax_diff": float(max(before) - min(before)),
        f"{prefix}/balanced_min": float(min(after)),
        f"{prefix}/balanced_max": float(max(after)),
        f"{prefix}/mean": float(lengths.sum() / len(partitions)),
    }


# verl's dynamic batches: rows of a batch cut by tokens


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
        dp_group: process group whose ranks agree on the largest number of micro-batches, if `same_micro_num_in_dp`.
        min_num_micro_batch: at least this many.
    Returns: the micro-batches and the row numbers of each.
    Raises: ValueError if one row exceeds the budget.
    """
    lengths = batch["attention_mask"].sum(-1).tolist()
    if max(lengths) > max_token_len:
        raise ValueError(f"a row has {max(lengths)} tokens, above max_token_len={max_token_len}; raise the budget")
    count = min(max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1), len(lengths))
    partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    while max(sum(lengths[i] for i in part) for part in partitions) > max_token_len:
        count += 1
        partitions = get_seqlen_balanced_partitions(lengths, count, equal_size=False)
    if dp_group is not None and same_micro_num_in_dp:
        agreed = torch.tensor([count], device=batch["attention_mask"].device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
        partitions = get_seqlen_balanced_partitions(lengths, int(agreed), equal_size=False)
    return [batch[torch.tensor(part)] for part in partitions], partitions


def prepare_dynamic_batch(data: DataProto, max_token_len: int) -> tuple[list[DataProto], list[list[int]]]:
    """`rearrange_micro_batches` for a DataProto: the micro-batches and the row numbers of each."""
    _, partitions = rearrange_micro_batches(data.batch, max_token_len)
    return [data.select_idxs(part) for part in partitions], partitions


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Puts results of concatenated micro-batches (rows, ...) back into the order the batch had."""
    return data[get_reverse_idx(list(chain.from_iterable(batch_idx_list)))]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse of a permutation."""
    return np.argsort(np.asarray(idx_map, dtype=np.int64), kind="stable").tolist()


# Our plan of an update: mini-batches of rows, micro-batches of prompt trees


def plan_mini_batches(num_rows: int, mini_batch_rows: int) -> list[range]:
    """Consecutive mini-batches of equal size. Raises ValueError unless it divides the rows."""
    if mini_batch_rows < 1 or num_rows % mini_batch_rows:
        raise ValueError(
            f"a batch of {num_rows} rows (prompts x n) does not divide into mini-batches of {mini_batch_rows}; "
            "choose a ppo_mini_batch_size that divides data.train_batch_size"
        )
    return [range(start, start + mini_batch_rows) for start in range(0, num_rows, mini_batch_rows)]


def rows_of_mini_batches(uids: Sequence[Hashable], count: int) -> list[list[int]]:
    """The rows of each of `count` mini-batches: groups in order of appearance, as many in each as in the next, or one more."""
    groups = list(_rows_by_key(uids).values())
    parts = np.array_split(np.arange(len(groups)), count)
    return [list(chain.from_iterable(groups[i] for i in part)) for part in parts]


def shuffled_groups(uids: Sequence[Hashable], generator: torch.Generator) -> Tensor:
    """A random order of rows that permutes groups and keeps the rows of a group together, in their own order.

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
    max_tree_tokens: int,
    pack_rows: bool = False,
) -> list[MicroBatch]:
    """Cuts rows into few micro-batches with little padding; the one of most padded tokens comes first.

    Two prompts of 10 tokens, responses of 5, 3 and 6, a budget of 40:

        keys a a b  ->  trees [0, 1] of 10 + 5 + 3 = 18 tokens, [2] of 10 + 6 = 16  ->  one micro-batch of 2 x 18 = 36

    Args:
        prompt_keys: rows with equal keys have the identical prompt.
        prompt_lengths, response_lengths: tokens of each row.
        max_token_len: budget of a micro-batch in padded tokens: trees x the longest of them. Or, instead,
        micro_batch_size: rows of a micro-batch, at most.
        share_prompts: whether rows of one key form trees; else every row is its own tree.
        max_tree_tokens: larger groups are split evenly into trees that each repeat the prompt, since a tree's dense
            attention mask grows with the square of its tokens.
        pack_rows: whether a micro-batch of single-row trees has no padding, so that it counts the sum of their tokens.
    Returns: micro-batches of trees of row numbers. A row larger than a limit is a tree, and a micro-batch, of its own.
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
    capacity = max_tree_tokens if max_token_len is None else min(max_tree_tokens, max_token_len)
    groups = _rows_by_key(prompt_keys if share_prompts else range(len(prompt_keys)))
    trees: list[tuple[int, Tree]] = []  # (tokens, rows)
    for key, rows in groups.items():
        prompt = prompt_lengths[rows[0]]
        if any(prompt_lengths[row] != prompt for row in rows):
            raise ValueError(f"rows {rows} share the prompt key {key!r} but not the prompt's length")
        for tree in _split_evenly(rows, response_lengths, capacity - prompt, max_rows):
            trees.append((prompt + sum(response_lengths[row] for row in tree), tree))
    trees.sort(key=lambda tree: (-tree[0], tree[1]))
    return _cut_sorted_trees(trees, max_token_len, max_rows, pack_rows)


def _rows_by_key(keys: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """Row numbers of each key, keys in order of appearance."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return groups


def _split_evenly(rows: list[int], lengths: Sequence[int], capacity: int, max_rows: int) -> list[Tree]:
    """Splits rows over the fewest bins that hold them, each row into the emptiest; one above capacity has its own."""
    fitting = sorted((row for row in rows if lengths[row] <= capacity), key=lambda row: (-lengths[row], row))
    own = [[row] for row in rows if lengths[row] > capacity]
    if not fitting:
        return own
    total = sum(lengths[row] for row in fitting)
    fewest = max(ceildiv(total, capacity) if capacity > 0 else 1, ceildiv(len(fitting), max_rows))
    for count in range(fewest, len(fitting) + 1):
        bins: list[tuple[int, Tree]] = [(0, []) for _ in range(count)]
        for row in fitting:
            open_bins = [b for b in range(count) if len(bins[b][1]) < max_rows]
            emptiest = min(open_bins, key=lambda b: bins[b][0])
            bins[emptiest] = (bins[emptiest][0] + lengths[row], [*bins[emptiest][1], row])
        if all(tokens <= capacity for tokens, _ in bins):
            break
    return own + [sorted(tree) for _, tree in bins if tree]


def _cut_sorted_trees(
    trees: Sequence[tuple[int, Tree]], max_token_len: int | None, max_rows: int, pack_rows: bool
) -> list[MicroBatch]:
    """Cuts trees, longest first, into the fewest consecutive micro-batches, and among those the least padded ones.

    Shortest path over cut positions; a micro-batch that starts with a tree of t tokens costs t for each of its trees, or, packed, its tokens.
    """
    one_more_batch = 1 + sum(tokens for tokens, _ in trees) * (len(trees) + 1)
    cost: list[float] = [0]
    start_of = [0]
    for end in range(1, len(trees) + 1):
        best, best_start, rows, unpadded = math.inf, end - 1, 0, 0
        for start in reversed(range(end)):
            tokens, tree = trees[start]
            rows, unpadded = rows + len(tree), unpadded + tokens
            packed = pack_rows and rows == end - start
            padded = unpadded if packed else (end - start) * tokens
            too_large = rows > max_rows or (max_token_len is not None and padded > max_token_len)
            if too_large and start < end - 1:  # a single tree is always allowed; further starts only grow
                break
            if cost[start] + one_more_batch + padded < best:
                best, best_start = cost[start] + one_more_batch + padded, start
        cost.append(best)
        start_of.append(best_start)
    cuts = [len(trees)]
    while cuts[-1] > 0:
        cuts.append(start_of[cuts[-1]])
    # The largest comes first: what the smaller ones allocate fits into what it freed, so memory does not grow in pieces.
    spans = sorted(pairwise(reversed(cuts)), key=lambda span: cost[span[0]] - cost[span[1]])
    return [[tree for _, tree in trees[start:end]] for start, end in spans]
