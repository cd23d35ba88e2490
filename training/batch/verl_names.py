"""verl names of batches."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from data.protocol import DataProto
from training.batch.batching import ceildiv, get_seqlen_balanced_partitions


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
