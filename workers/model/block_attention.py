"""Attention over packed rows on any device and in any type, some segments at a time.

Invariant: no mask is made but that of a block of segments, and the gradients of keys that several
segments read add up in float32.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workers.model.sequences import Block, Sequences

# A block whose segments have at most so many pairs of a query and a key is computed in float32.
SHORT = 1 << 18


class TakeKeys(torch.autograd.Function):
    """Copies rows of keys or values (total, heads, D) to where segments read them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        """Returns the rows at `places`."""
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Adds up in float32 what every copy of a row brings."""
        (places,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        total.index_add_(0, places, gradient.float())
        return total.to(gradient.dtype), None


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Attends causally along each segment: q (total, H, D), k and v (total, H or fewer, D).

    Returns: the output, in q's shape and type.
    """
    blocks, order = sequences.blocks
    outputs = [_attend(q, k, v, block, scale) for block in blocks]
    return torch.cat(outputs).index_select(0, order)


def _attend(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float | None) -> Tensor:
    """Computes the outputs of one block's segments, without padding: (their queries, H, D)."""
    count, n = block.queries.shape
    m = block.keys.shape[1]
    # A CPU's backward pass of short segments in bfloat16 is several times slower.
    dtype = torch.float32 if n * m <= SHORT else q.dtype
    query = q.index_select(0, block.queries.flatten()).to(dtype)
    key = TakeKeys.apply(k, block.keys.flatten()).to(dtype)
    value = TakeKeys.apply(v, block.keys.flatten()).to(dtype)
    # A single segment without keys before its own needs no mask.
    plain = count == 1 and n == m
    device_type = q.device.type
    autocast = nullcontext()
    if torch.amp.is_autocast_available(device_type):
        # Autocast would cast them.
        autocast = torch.autocast(device_type, enabled=False)
    with autocast:
        output = scaled_dot_product_attention(
            query.unflatten(0, (count, n)).transpose(1, 2),  # (S, H, n, D)
            key.unflatten(0, (count, m)).transpose(1, 2),
            value.unflatten(0, (count, m)).transpose(1, 2),
            None if plain else _causal_mask(block),
            is_causal=plain,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    padded = output.transpose(1, 2).flatten(0, 1)  # (S * n, H, D)
    return padded.index_select(0, block.real).to(q.dtype)


def _causal_mask(block: Block) -> Tensor:
    """Makes the mask of what each query of a block sees: (S, 1, n, m) bool."""
    n = block.queries.shape[1]
    m = block.keys.shape[1]
    places = torch.arange(max(n, m), device=block.queries.device)
    last_seen = places[:n] + block.offsets  # (S, n)
    return (places[:m] <= last_seen[..., None])[:, None]
