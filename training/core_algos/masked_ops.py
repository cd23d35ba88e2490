"""Reduces tensors over a mask, and clips and widens them.

Invariant: a masked reduction over nothing is zero, never NaN, and what is masked out may hold
anything, NaN included. Sums accumulate in float64, a block of rows at a time, so that no copy is
as large as the batch.
"""

from types import EllipsisType

import torch
from torch import Tensor

from data.array_ops import row_blocks


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clamps elementwise between two tensors."""
    return torch.minimum(torch.maximum(x, tensor_min), tensor_max)


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Widens halves and integers to float32; float64 stays."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sums the values where the mask is not zero, over `axis` (None: over all)."""
    return torch.where(mask.bool(), values, 0).sum(axis, dtype=torch.float64).to(values.dtype)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Averages the values where the mask is not zero; 0 over an empty mask."""
    blocks: list[slice] | list[EllipsisType] = [...]
    if axis is None and values.shape == mask.shape:
        blocks = _blocks(values)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for rows in blocks:
        kept = torch.where(mask[rows].bool(), values[rows], 0)
        total = total + kept.sum(axis, dtype=torch.float64)
    count = _count(mask) if axis is None else mask.bool().sum(axis)
    return (total / count.clamp(min=1)).to(values.dtype)


def masked_range(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the lowest and the highest value where the mask is not zero; 0 over an empty mask."""
    kept = values[mask.bool()]
    if kept.numel() == 0:
        kept = values.new_zeros(1)
    lowest, highest = kept.aminmax()
    return lowest, highest


def masked_var(
    values: Tensor, mask: Tensor, unbiased: bool = True, mean: Tensor | None = None
) -> Tensor:
    """Computes the variance where the mask is not zero, 0-dim; 0 where there are fewer than two.

    Args:
        mean: of the values, where it is known.
    """
    mask = mask.expand_as(values)
    if mean is None:
        mean = masked_mean(values, mask)
    count = _count(mask)
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for rows in _blocks(values):
        squares = torch.where(mask[rows].bool(), (values[rows] - mean) ** 2, 0)
        total = total + squares.sum(dtype=torch.float64)
    variance = (total / count.clamp(min=1)).to(values.dtype)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    return variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales values to unit variance over the mask and, with `shift_mean`, moves them to mean zero.

    Returns: the inputs' shape; zero outside the mask, and zero everywhere where the mask holds
        fewer than two.
    """
    mask = mask.bool()
    mean = masked_mean(values, mask)
    scale = torch.rsqrt(masked_var(values, mask, mean=mean) + 1e-8)
    several = _count(mask) > 1
    centre = 0 if shift_mean else mean
    return torch.where(mask & several, (values - mean) * scale + centre, 0)


def sampled_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sums each row where the mask is not zero: (batch,) float64."""
    sums = []
    for rows in row_blocks(mask):
        kept = torch.where(mask[rows].bool(), values[rows], 0)
        sums.append(kept.sum(-1, dtype=torch.float64))
    return torch.cat(sums)


def _count(mask: Tensor) -> Tensor:
    """Counts what is not zero, 0-dim; in blocks, which is three times as fast."""
    return torch.stack([mask[rows].count_nonzero() for rows in _blocks(mask)]).sum()


def _blocks(values: Tensor) -> list[slice] | list[EllipsisType]:
    """Cuts rows into blocks; a tensor without rows is one block."""
    if values.dim() == 0:
        return [...]
    return row_blocks(values)
