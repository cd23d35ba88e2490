"""Tensor maths not about reinforcement learning: log-probs, masked reductions, padding, learning-rate schedules.

Invariant: a masked reduction over nothing is zero, never NaN, and what is masked out may hold anything, NaN included.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as nnf
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Truncation = Literal["left", "right", "middle", "error"]


# Log-probs and entropy, in nats; in float32 whatever the logits' dtype, because bfloat16 has 8 bits of mantissa


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label.

    Args:
        logits: (..., vocabulary), any float dtype.
        labels: (...) int64.
    Returns: (...) float32 (float64 for float64 logits).
    """
    flat = _at_least_float32(logits).flatten(0, -2)  # (tokens, vocabulary)
    return -nnf.cross_entropy(flat, labels.flatten(), reduction="none").view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of the softmax: (..., vocabulary) -> (...) float32. Logits of -inf are tokens that cannot be sampled."""
    log_probs = torch.log_softmax(_at_least_float32(logits), dim=-1)
    # 0 * log 0 is 0, and 0 * -inf would be NaN
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """`entropy_from_logits` for `chunk_size` tokens at a time, so that float32 copies of few logits exist at once."""
    chunks = logits.flatten(0, -2).split(chunk_size)
    return torch.cat([entropy_from_logits(chunk) for chunk in chunks]).view(logits.shape[:-1])


class _LogProbsAndEntropy(torch.autograd.Function):
    """Log-prob of each label and entropy of each row, with no float32 copy of the logits but a few rows' at a time.

    Saves the logits as they came; backward writes their gradient row block by row block:
    d log p(y) / d z = onehot(y) - p        d H / d z = -p * (log p + H)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        entropies, log_sums = torch.empty_like(log_probs), torch.empty_like(log_probs)
        for rows in _row_blocks(logits):
            z = logits[rows].float() / temperature  # (block, vocabulary)
            log_sums[rows] = z.logsumexp(-1)
            log_p = z.sub_(log_sums[rows, None])
            log_probs[rows] = log_p.gather(1, labels[rows, None]).squeeze(1)
            entropies[rows] = -log_p.exp().mul_(log_p).sum(-1)
        ctx.save_for_backward(logits, labels, log_sums, entropies)
        ctx.temperature = temperature
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropies: Tensor) -> tuple[Tensor, None, None]:
        logits, labels, log_sums, entropies = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        with_entropy = bool(grad_entropies.any())
        for rows in _row_blocks(logits):
            z = logits[rows].to(torch.float32, copy=True)  # (block, vocabulary); the logits themselves stay as they are
            log_p = z.div_(ctx.temperature).sub_(log_sums[rows, None])
            p = log_p.exp()
            weight = grad_log_probs[rows, None].neg()
            if with_entropy:
                weight = weight - grad_entropies[rows, None] * (log_p + entropies[rows, None])
            block = p.mul_(weight)
            block.scatter_add_(1, labels[rows, None], grad_log_probs[rows, None])
            gradient[rows] = block.div_(ctx.temperature).to(gradient.dtype)
        return gradient, None, None


def _row_blocks(logits: Tensor, block_bytes: int = 1 << 23) -> list[slice]:
    """Slices over the rows of (tokens, vocabulary) whose float32 copy is at most `block_bytes`, on a GPU 16 times that."""
    block_bytes *= 16 if logits.is_cuda else 1
    size = max(1, block_bytes // (4 * logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def log_probs_and_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and the entropy, both (tokens,) float32, of softmax(logits / temperature); differentiable.

    Args:
        logits: (tokens, vocabulary), finite, any float dtype; kept for the backward pass in that dtype.
        labels: (tokens,) int64.
    """
    return _LogProbsAndEntropy.apply(logits, labels, temperature)


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# Masked reductions


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Elementwise clamp between two tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the values where the mask is not zero, over `axis` (None: over all); accumulated in float64."""
    return torch.where(mask.bool(), values, 0).sum(axis, dtype=torch.float64).to(values.dtype)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the values where the mask is not zero; 0 over an empty mask."""
    total = torch.where(mask.bool(), values, 0).sum(axis, dtype=torch.float64)
    return (total / mask.bool().sum(axis).clamp(min=1)).to(values.dtype)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values where the mask is not zero, 0-dim; 0 where there are fewer than two."""
    count = mask.bool().sum()
    square = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return square * count / (count - 1).clamp(min=1) if unbiased else square


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values scaled to unit variance over the mask and, with `shift_mean`, moved to mean zero.

    Returns: the inputs' shape, zero outside the mask, and zero everywhere where the mask holds fewer than two.
    """
    mask = mask.bool()
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask & (mask.sum() > 1), whitened, 0)


# Sequences and padding


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end token, 0 after it: (batch, response_len) of `dtype`."""
    ends = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device))
    return (ends.cumsum(-1) - ends.long() == 0).to(dtype)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Pads the last dimension up to `max_seq_len`; longer ones stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return nnf.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Right-pads lists of token ids to the longest, or to `max_length` if that is longer: (batch, length) int64."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response], dtype=torch.int64)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: Truncation = "error",
) -> tuple[Tensor, Tensor]:
    """Brings sequences to exactly `max_length` tokens.

    Args:
        input_ids, attention_mask: (batch, length) int64.
        truncation: which part of a longer sequence is lost: left, right, middle; or error.
    Returns: input_ids, attention_mask: (batch, max_length).
    """
    length = input_ids.shape[-1]
    if length <= max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation == "error":
        raise ValueError(
            f"a sequence of {length} tokens exceeds max_length={max_length}; "
            "raise it, or set truncation to left, right or middle"
        )
    kept_ahead = {"left": 0, "middle": max_length // 2, "right": max_length}
    if truncation not in kept_ahead:
        raise ValueError(f"truncation='{truncation}' is unknown; allowed: left, right, middle, error")
    ahead = kept_ahead[truncation]
    tail_start = length - (max_length - ahead)
    ids, mask = (torch.cat([x[..., :ahead], x[..., tail_start:]], dim=-1) for x in (input_ids, attention_mask))
    return ids, mask


# Learning-rate schedules: factors of the optimizer's own rate; a warm-up rises linearly from zero


def get_constant_schedule_with_warmup(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int | None = None, last_epoch: int = -1
) -> LambdaLR:
    """The full rate after the warm-up. `num_training_steps` is unused: all schedules are called alike."""
    return LambdaLR(optimizer, lambda step: _warmup(step, num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """A cosine from the full rate down to `min_lr_ratio` of it; half a cycle by default."""

    def factor(step: int) -> float:
        progress = (step - num_warmup_steps) / max(num_training_steps - num_warmup_steps, 1)
        return _warmup(step, num_warmup_steps) * _cosine(progress, min_lr_ratio, num_cycles)

    return LambdaLR(optimizer, factor, last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Warm-up, stable, decay (arXiv:2404.06395): the full rate for `stable_ratio` of the rest, then a cosine."""
    stable_until = num_warmup_steps + stable_ratio * (num_training_steps - num_warmup_steps)

    def factor(step: int) -> float:
        progress = (step - stable_until) / max(num_training_steps - stable_until, 1)
        return _warmup(step, num_warmup_steps) * _cosine(progress, min_lr_ratio, num_cycles)

    return LambdaLR(optimizer, factor, last_epoch)


def _warmup(step: int, num_warmup_steps: int) -> float:
    return min(step / num_warmup_steps, 1.0) if num_warmup_steps > 0 else 1.0


def _cosine(progress: float, floor: float, num_cycles: float) -> float:
    """1 before progress 0, then a cosine between 1 and `floor` until progress 1."""
    wave = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * min(max(progress, 0.0), 1.0)))
    return floor + (1 - floor) * wave
