"""Tensor maths that knows nothing of reinforcement learning: log-probs with entropy, and masked reductions.

Invariant: a masked reduction over nothing is zero, never NaN, and what is masked out may hold anything, NaN included.
Log-probs and entropies, in nats, are computed in float32 whatever the logits' dtype: bfloat16 has 8 bits of mantissa.
"""

from typing import Any

import torch
from torch import Tensor


class _LogProbsAndEntropy(torch.autograd.Function):
    """Computes each row's log-prob of its label and entropy, with float32 copies of few rows of logits at a time.

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
            # A copy also of float32, since the logits stay as they are.
            z = logits[rows].to(torch.float32, copy=True)  # (block, vocabulary)
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
    """Cuts the rows of (tokens, vocabulary) into blocks whose float32 copy has at most `block_bytes`.

    On a GPU they have 16 times that.
    """
    block_bytes *= 16 if logits.is_cuda else 1
    size = max(1, block_bytes // (4 * logits.shape[1]))
    return [slice(start, start + size) for start in range(0, len(logits), size)]


def log_probs_and_entropy(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Computes labels' log-probs and entropies under softmax(logits / temperature), (tokens,) float32 each.

    Both are differentiable.

    Args:
        logits: (tokens, vocabulary), finite, any float dtype; kept for the backward pass in that dtype.
        labels: (tokens,) int64.
    """
    return _LogProbsAndEntropy.apply(logits, labels, temperature)


# Masked reductions


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clamps elementwise between two tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Averages the values where the mask is not zero; 0 over an empty mask."""
    total = torch.where(mask.bool(), values, 0).sum(axis, dtype=torch.float64)
    return (total / mask.bool().sum(axis).clamp(min=1)).to(values.dtype)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Computes the variance of the values where the mask is not zero, 0-dim; 0 where there are fewer than two."""
    count = mask.bool().sum()
    square = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return square * count / (count - 1).clamp(min=1) if unbiased else square


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to unit variance over the mask and, with `shift_mean`, moves them to mean zero.

    Returns: the inputs' shape, zero outside the mask, and zero everywhere where the mask holds fewer than two.
    """
    mask = mask.bool()
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask & (mask.sum() > 1), whitened, 0)
