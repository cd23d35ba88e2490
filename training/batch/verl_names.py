"""What verl's users know of batches and tensors: dynamic batches, padding, log-probs; and the schedules of a run.

`training.batch` offers all of it under verl's names. Invariant: tensor functions are pure, and what a mask leaves out
may hold anything, NaN included; learning-rate schedules are transformers' own, which is imported where one is made.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from tensordict import TensorDict
from torch import Tensor

from data.protocol import DataProto
from training.batch.batching import ceildiv, get_seqlen_balanced_partitions
from training.batch.torch_functional import at_least_float32

# Dynamic batches


def log_seqlen_unbalance(
    seqlen_list: Sequence[int], partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Counts tokens per partition, before balancing (contiguous rows) and after, as metrics `prefix/...`."""
    lengths = np.asarray(seqlen_list)
    before = [part.sum() for part in np.array_split(lengths, len(partitions))]
    after = [lengths[list(part)].sum() for part in partitions]
    found = {"min": min(before), "max": max(before), "minmax_diff": max(before) - min(before), "mean": np.mean(before)}
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
        raise ValueError(f"a row has {max(lengths)} tokens, above max_token_len={max_token_len}; raise the budget")
    count = min(max(ceildiv(sum(lengths), max_token_len), min_num_micro_batch or 1), len(lengths))
    cuts = (get_seqlen_balanced_partitions(lengths, k, equal_size=False) for k in range(count, len(lengths) + 1))
    partitions = next(cut for cut in cuts if max(sum(lengths[i] for i in part) for part in cut) <= max_token_len)
    if dp_group is not None and same_micro_num_in_dp:
        agreed = torch.tensor([len(partitions)], device=batch["attention_mask"].device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=dp_group)
        partitions = get_seqlen_balanced_partitions(lengths, int(agreed), equal_size=False)
    return [batch[torch.tensor(part)] for part in partitions], partitions


def prepare_dynamic_batch(data: DataProto, max_token_len: int) -> tuple[list[DataProto], list[list[int]]]:
    """Cuts a DataProto as `rearrange_micro_batches` does: the micro-batches and the row numbers of each."""
    _, partitions = rearrange_micro_batches(data.batch, max_token_len)
    return [data.select_idxs(part) for part in partitions], partitions


def restore_dynamic_batch(data: Tensor, batch_idx_list: Sequence[Sequence[int]]) -> Tensor:
    """Puts results of concatenated micro-batches (rows, ...) back into the order the batch had."""
    return data[get_reverse_idx(list(chain.from_iterable(batch_idx_list)))]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Inverts a permutation."""
    return np.argsort(np.asarray(idx_map, dtype=np.int64), kind="stable").tolist()


# Log-probs and entropy, in nats and float32


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the log-probability of each label.

    Args:
        logits: (..., vocabulary), any float dtype.
        labels: (...) int64.
    Returns: (...) float32 (float64 for float64 logits).
    """
    flat = at_least_float32(logits)[0].flatten(0, -2)  # (tokens, vocabulary)
    return -nnf.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Computes the softmax's entropy: (..., vocabulary) -> (...) float32. Tokens of logit -inf cannot be sampled."""
    log_probs = torch.log_softmax(at_least_float32(logits)[0], dim=-1)
    # 0 * log 0 is 0, and 0 * -inf would be NaN.
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Runs `entropy_from_logits` on `chunk_size` tokens at a time: float32 copies of few logits exist at once."""
    chunks = logits.flatten(0, -2).split(chunk_size)
    return torch.cat([entropy_from_logits(chunk) for chunk in chunks]).view(logits.shape[:-1])


# Masks and padding


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sums the values where the mask is not zero, over `axis` (None: over all); accumulates in float64."""
    return torch.where(mask.bool(), values, 0).sum(axis, dtype=torch.float64).to(values.dtype)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Returns 1 up to and including the first end token, 0 after it: (batch, response_len) of `dtype`."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    return (ends.cumsum(-1) - ends.long() == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Pads the last dimension up to `max_seq_len`; longer ones stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return nnf.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Pads lists of token ids on the right to the longest, or to a longer `max_length`: (batch, length) int64."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response], dtype=torch.int64)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Literal["left", "right", "middle", "error"] = "error",
) -> tuple[Tensor, Tensor]:
    """Brings sequences to exactly `max_length` tokens.

    Args:
        input_ids, attention_mask: (batch, length) int64.
        truncation: which part of a longer sequence is lost: left, right, middle; or error.
    Returns: input_ids, attention_mask: (batch, max_length).
    """
    from data.rl_dataset import truncate

    length = input_ids.shape[-1]
    if length <= max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    kept = truncate(list(range(length)), max_length, truncation, "postprocess_data")
    return input_ids[..., kept], attention_mask[..., kept]


# Learning-rate schedules: factors of the optimizer's own rate, after a linear warm-up


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int | None = None, last_epoch: int = -1
) -> torch.optim.lr_scheduler.LambdaLR:
    """Keeps the full rate after the warm-up. `num_training_steps` is unused: all schedules are called alike."""
    import transformers

    return transformers.get_constant_schedule_with_warmup(optimizer, num_warmup_steps, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Lowers the rate by a cosine to `min_lr_ratio` of it; half a cycle by default, reached at `num_training_steps`.

    Steps beyond those follow the cosine on, so that the rate rises again.
    """
    import transformers

    return transformers.get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, num_warmup_steps, num_training_steps, num_cycles, last_epoch, min_lr_rate=min_lr_ratio
    )


def get_wsd_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warms up, keeps the full rate for `stable_ratio` of the rest (whole steps), then decays (arXiv:2404.06395).

    The warm-up starts at `min_lr_ratio` of the rate, not at zero; the decay is a cosine down to that ratio, which holds
    from `num_training_steps` on.
    """
    import transformers

    stable = int(stable_ratio * (num_training_steps - num_warmup_steps))
    decay = num_training_steps - num_warmup_steps - stable
    shape = {"min_lr_ratio": min_lr_ratio, "num_cycles": num_cycles, "last_epoch": last_epoch}
    return transformers.get_wsd_schedule(optimizer, num_warmup_steps, decay, num_stable_steps=stable, **shape)
