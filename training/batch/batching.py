"""Episodes, groups and cuts of a batch: which rows belong together, and how they go to ranks and into micro-batches.

Estimators, filters and metrics see episodes, so that one counts once however many rows it has, and its rewards reach
back over all of them. Dummy rows, which only pad a batch to the ranks, are an episode each, and enter no average.
DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) replaces groups whose members all have the same reward; a group
enters whole. Invariant: in a cut every row appears exactly once, and the same input gives the same plan.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, pairwise
from operator import itemgetter
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from data.containers import row_sums
from data.protocol import DUMMY_UID, DataProto
from data.texts import say, unknown_name
from training.batch.torch_functional import sampled_sums
from training.config import BatchPlan, FilterGroupsConfig, MicroBatching


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
        self._episode_of_row = torch.tensor(
            [owner[row] for row in range(len(batch))], dtype=torch.int64
        )

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
        columns = {
            name: values[self.first] for name, values in self._batch.non_tensor_batch.items()
        }
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
        return list(
            rows_by_key(
                longest[keys[owner]].bit_length() for owner in self._episode_of_row.tolist()
            ).values()
        )

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
        return values.new_zeros(len(found)).scatter_reduce(
            0, numbers, values, how, include_self=False
        )


Key = TypeVar("Key", bound=Hashable)


def ceildiv(a: int, b: int) -> int:
    """Divides a by b and rounds up."""
    return -(-a // b)


def roundup_divisible(a: int, divisor: int) -> int:
    """Returns the smallest multiple of `divisor` that is not below `a`."""
    return ceildiv(a, divisor) * divisor


def karmarkar_karp(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
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
        bins = [
            (a + b, rows + others)
            for (a, rows), (b, others) in zip(first, reversed(second), strict=True)
        ]
        bins.sort(key=lambda part: (-part[0], -len(part[1])))
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], number, bins))
    return [rows for _, rows in heap[0][2]]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Partitions rows into k non-empty lists, each ascending, with nearly equal sums of lengths.

    Raises: ValueError if there are fewer rows than partitions, or with `equal_size` if k does not divide their number.
    """
    rows = len(seqlen_list)
    if not 1 <= k_partitions <= rows:
        raise ValueError(f"cannot cut {rows} rows into {k_partitions} non-empty partitions")
    if equal_size and rows % k_partitions:
        raise ValueError(
            f"equal_size: {rows} rows do not divide into {k_partitions} partitions; pad the batch first"
        )
    return sorted(sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size))


def arrange(batch: DataProto, plan: BatchPlan) -> DataProto:
    """Orders rows for the ranks, each of which gets a consecutive chunk that holds its share of every part in turn.

    A part has its prompts' rows, on any number of ranks, and dummy rows where another part has more (episodes may
    have several rows) or the ranks do not divide them. A group's rows stay on one rank as far as they fit, because
    there they share their prompt.
    """
    parts = rows_of_parts(list(batch.non_tensor_batch["uid"]), plan.parts)
    size = roundup_divisible(max(sum(map(len, groups)) for groups in parts), plan.ranks)
    as_they_are = [row for groups in parts for group in groups for row in group] == [
        *range(len(batch))
    ]
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
            too_large = end - start > most_rows or (
                limits.max_token_len is not None and padded > limits.max_token_len
            )
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


SUM_OF_REWARDS = ("seq_reward", "score")
# What columns of the reward function's other values begin with.
REWARD_INFO = "reward_info/"


def collect_varied_groups(
    batches: Iterator[DataProto], settings: FilterGroupsConfig, wanted: int
) -> tuple[DataProto, dict[str, float]]:
    """Draws batches until `wanted` groups differ within themselves, `max_num_gen_batches` at most (0: without end).

    Args:
        batches: scored batches of whole groups, made as they are drawn.
        wanted: groups of a step.
    Returns:
        the first `wanted` groups that vary, fewer where the bound was met; and metrics: batches drawn, groups dropped.
    Raises:
        ValueError: no group at all varies.
    """
    kept: list[DataProto] = []
    found = drawn = dropped = 0
    while found < wanted and not 0 < settings.max_num_gen_batches <= drawn:
        batch, drawn = next(batches), drawn + 1
        varied, uniform = varied_groups(batch, settings.metric)
        take = set(varied[: wanted - found])
        found, dropped = found + len(take), dropped + uniform
        if take:
            kept.append(
                batch.select_idxs(np.array([uid in take for uid in batch.non_tensor_batch["uid"]]))
            )
    if not kept:
        raise ValueError(say("nothing_varies", drawn=drawn, metric=settings.metric))
    return DataProto.concat(kept), {
        "filter_groups/batches": float(drawn),
        "filter_groups/dropped": float(dropped),
    }


def varied_groups(batch: DataProto, metric: str) -> tuple[list[str], int]:
    """Lists the uids of groups whose episodes differ in `metric`, in order, and counts the groups that do not.

    Masked episodes do not count.
    """
    episodes = EpisodeRows(batch)
    live, values = (episodes.lengths > 0).tolist(), _values(batch, episodes, metric)
    groups = rows_by_key(str(uid) for uid in batch.non_tensor_batch["uid"][episodes.first])
    varied = [
        uid for uid, members in groups.items() if len({values[i] for i in members if live[i]}) > 1
    ]
    return varied, len(groups) - len(varied)


def _values(batch: DataProto, episodes: EpisodeRows, metric: str) -> list[float]:
    if metric in SUM_OF_REWARDS:
        return episodes.totals(batch.batch["token_level_scores"]).float().tolist()
    column = batch.non_tensor_batch.get(REWARD_INFO + metric)
    if column is None:
        known = [
            name.removeprefix(REWARD_INFO)
            for name in batch.non_tensor_batch
            if name.startswith(REWARD_INFO)
        ]
        raise unknown_name("algorithm.filter_groups.metric", metric, [*SUM_OF_REWARDS, *known])
    return [float(column[row]) for row in episodes.first]


# Dynamic batches


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Counts tokens per partition, before balancing (contiguous rows) and after, as metrics `prefix/...`."""
    lengths = np.asarray(seqlen_list)
    before = [part.sum() for part in np.array_split(lengths, len(partitions))]
    after = [lengths[list(part)].sum() for part in partitions]
    found = {
        "min": min(before),
        "max": max(before),
        "minmax_diff": max(before) - min(before),
        "mean": np.mean(before),
    }
    found |= {"balanced_min": min(after), "balanced_max": max(after)}
    return {f"{prefix}/{name}": float(tokens) for name, tokens in found.items()}


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
        raise ValueError(
            f"a row has {max(lengths)} tokens, above max_token_len={max_token_len}; raise the budget"
        )
    count = min(max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1), len(lengths))
    cuts = (
        get_seqlen_balanced_partitions(lengths, k, equal_size=False)
        for k in range(count, len(lengths) + 1)
    )
    partitions = next(
        cut for cut in cuts if max(sum(lengths[i] for i in part) for part in cut) <= max_token_len
    )
    if dp_group is not None and same_micro_num_in_dp:
        agreed = torch.tensor([len(partitions)], device=batch["attention_mask"].device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
        partitions = get_seqlen_balanced_partitions(lengths, int(agreed), equal_size=False)
    return [batch[torch.tensor(part)] for part in partitions], partitions


def prepare_dynamic_batch(
    data: DataProto, max_token_len: int
) -> tuple[list[DataProto], list[list[int]]]:
    """Cuts a DataProto as `rearrange_micro_batches` does: the micro-batches and the row numbers of each."""
    _, partitions = rearrange_micro_batches(data.batch, max_token_len)
    return [data.select_idxs(part) for part in partitions], partitions


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Puts results of concatenated micro-batches (rows, ...) back into the order the batch had."""
    return data[get_reverse_idx(list(chain.from_iterable(batch_idx_list)))]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Inverts a permutation."""
    return np.argsort(np.asarray(idx_map, dtype=np.int64), kind="stable").tolist()
