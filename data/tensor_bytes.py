"""Packs tensors for their way between processes, without the padding of their rows.

Invariant: `from_bytes` gives back every bit that `to_bytes` was given.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Padding is left out where that saves a fifth or more.
LARGEST_SHARE = 0.8


@dataclass(frozen=True)
class Padding:
    """Describes what is left out of a packed matrix: row i holds `before` up to `starts[i]`, and
    `behind` from `ends[i]`.
    """

    before: int
    behind: int
    starts: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class PackedTensor:
    """Holds a tensor's bits as integers, because numpy has no bfloat16.

    Equal floats may have other bits. Without `padding` the bits are the whole tensor's.
    """

    bits: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]
    padding: Padding | None = None


def to_bytes(tensor: Tensor) -> PackedTensor:
    """Packs a tensor, a matrix without the padding at both ends of its rows where that saves much.

    Padding is the most frequent value of the first column, and of the last.
    """
    shape = tuple(tensor.shape)
    flat = tensor.detach().cpu().contiguous().flatten()
    # Bytes where no integer is as wide.
    integer_type = getattr(torch, f"int{8 * flat.element_size()}", torch.uint8)
    integers = flat.view(integer_type)
    bits = integers.numpy()
    if tensor.dim() == 2 and bits.size == tensor.numel() > 0:
        matrix = bits.reshape(shape)
        edges = integers.view(shape)[:, [0, -1]]
        before, behind = edges.mode(dim=0).values.tolist()
        starts = _repeats(matrix, before)
        ends = np.maximum(shape[1] - _repeats(matrix[:, ::-1], behind), starts)
        if (ends - starts).sum() <= LARGEST_SHARE * bits.size:
            rows = [row[start:end] for row, start, end in zip(matrix, starts, ends, strict=True)]
            padding = Padding(before=before, behind=behind, starts=starts, ends=ends)
            return PackedTensor(np.concatenate(rows), tensor.dtype, shape, padding)
    return PackedTensor(bits, tensor.dtype, shape)


def from_bytes(packed: PackedTensor) -> Tensor:
    """Unpacks what `to_bytes` packed, on the CPU."""
    bits = packed.bits
    padding = packed.padding
    if padding is None:
        # Ray hands out read-only memory, and torch has no read-only tensors.
        if not bits.flags.writeable:
            bits = bits.copy()
        return torch.from_numpy(bits).view(packed.dtype).view(packed.shape)
    matrix = np.empty(packed.shape, bits.dtype)
    place = 0
    for row, start, end in zip(matrix, padding.starts, padding.ends, strict=True):
        length = end - start
        row[:start] = padding.before
        row[start:end] = bits[place : place + length]
        row[end:] = padding.behind
        place += length
    return torch.from_numpy(matrix).view(packed.dtype)


def _repeats(matrix: np.ndarray, value: int) -> np.ndarray:
    """Counts how often each row begins with the value."""
    differs = matrix != value
    return np.where(differs.any(axis=1), differs.argmax(axis=1), matrix.shape[1])
