"""The attention of models that attend fully: over packed rows, and over the ranks of a sequence-parallel group.

    rows       P0 A0 A1 | P1 P2 B0 B1        packed   P0 A0 A1 P1 P2 B0 B1 0        lengths 3 4 1, boundaries 0 3 7 8
    rank 0     P0 A0 A1 P1, all heads   ->   all positions, half of the heads       (and back behind the attention)
    rank 1     P2 B0 B1 0,  all heads   ->   all positions, the other half

The ranks of a sequence-parallel group (Ulysses, arXiv:2309.14509) hold a part of the positions each, and exchange
positions for heads around the attention. A model takes it by name (`use_own_attention`), and a micro-batch's
`Sequences` reach it as a keyword of the model's forward. Invariant: without them it is transformers' sdpa, so shared
prompts (which have a mask) and the model's own uses go on as before. Nothing is dropped out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "ppo_core"
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
KERNEL_HEADS = range(8, 257, 8)
KERNEL_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """Holds what attention must know of a micro-batch beyond its mask.

    Attributes:
        lengths: tokens of each packed sequence; empty: nothing is packed.
        boundaries: of packed sequences, (n + 1,) int32: 0 and the sums of the lengths so far.
        group: the sequence-parallel group, whose ranks hold a part of the positions each.
    """

    lengths: tuple[int, ...] = ()
    boundaries: Tensor | None = None
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Sequences:
        """Describes packed sequences of these lengths."""
        return cls(lengths=tuple(lengths), boundaries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))

    def to(self, device: torch.device, non_blocking: bool = False) -> Sequences:
        """Returns a copy whose tensor is on the device."""
        moved = None if self.boundaries is None else self.boundaries.to(device, non_blocking=non_blocking)
        return replace(self, boundaries=moved)


def use_own_attention(module: nn.Module) -> bool:
    """Makes a transformers model attend through this file; false where its code has its attention built in."""
    module.set_attn_implementation(NAME)
    return module.config.get_text_config()._attn_implementation == NAME


def own_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequences: Sequences | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends, called by transformers in each layer: query (B, H, L, D), key and value (B, H or fewer, L, D).

    Returns the output (B, L, H, D), and None for the weights.
    """
    if sequences is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    query, key, value = _in_compute_type(query, key, value)
    if sequences.group is not None:
        query, key, value = to_heads(query, key, value, sequences.group)
    if sequences.lengths:
        output = packed_attention(query, key, value, sequences, scaling)
    else:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        causal = attention_mask is None
        output = scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scaling)
    if sequences.group is not None:
        output = Exchange.apply(output, sequences.group, 2, 1)
    return output.transpose(1, 2).contiguous(), None


def own_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Makes sdpa's mask, or None where only causality is asked for.

    Where packed positions start again is said by `Sequences`, not by a dense mask.
    """
    if attention_mask is None and kwargs["q_length"] == kwargs["kv_length"]:
        return None
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, own_attention)
AttentionMaskInterface.register(NAME, own_mask)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None) -> Tensor:
    """Attends causally within each sequence: query (1, H, total, D), key and value (1, H or fewer, total, D).

    Returns the output in query's shape. Takes a kernel for sequences of various lengths where there is one; else a
    loop.
    """
    if _has_kernel(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (total, heads, D)
        assert sequences.boundaries is not None
        kernel = flash_kernel if has_flash_attn() else torch_kernel
        return kernel(q, k, v, sequences.boundaries, max(sequences.lengths), scale).transpose(0, 1)[None]
    return loop_attention(query, key, value, sequences.lengths, scale)


def loop_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float | None) -> Tensor:
    """Does `packed_attention` for any device and type, a sequence at a time."""
    parts = zip(*(x.split(list(lengths), dim=2) for x in (query, key, value)), strict=True)
    gqa = query.shape[1] != key.shape[1]
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa) for q, k, v in parts]
    return torch.cat(outputs, dim=2)


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float | None) -> Tensor:
    """Runs the package flash_attn: q (total, H, D), k and v (total, H or fewer, D) -> as q."""
    from flash_attn import flash_attn_varlen_func

    exact = torch.are_deterministic_algorithms_enabled()
    return flash_attn_varlen_func(
        q, k, v, boundaries, boundaries, longest, longest, softmax_scale=scale, causal=True, deterministic=exact
    )


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float | None) -> Tensor:
    """Runs PyTorch's own kernel, shapes as for `flash_kernel`; a window of (-1, 0) is causal attention."""
    from torch.nn.attention.varlen import varlen_attn

    gqa = q.shape[1] != k.shape[1]
    return varlen_attn(
        q, k, v, boundaries, boundaries, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=gqa
    )


@cache
def has_flash_attn() -> bool:
    """Says whether the package flash_attn is installed."""
    return find_spec("flash_attn") is not None


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Says whether a kernel takes these: both want CUDA from Ampere on, two-byte types, heads of one size up to 256."""
    if not query.is_cuda or query.dtype not in KERNEL_DTYPES or query.shape[-1] != value.shape[-1]:
        return False
    return query.shape[-1] in KERNEL_HEADS and torch.cuda.get_device_capability(query.device) >= KERNEL_CAPABILITY


def check_shared_sequences(module: nn.Module, ranks: int) -> None:
    """Raises ValueError where `ranks` ranks cannot share this model's sequences."""
    config, given = module.config.get_text_config(), f"ulysses_sequence_parallel_size={ranks}"
    heads = config.num_attention_heads
    if heads % ranks:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(f"{given} does not divide the model's {heads} attention heads; use one of {allowed}")
    if config._attn_implementation != NAME:
        raise ValueError(
            f"{given}: model type '{config.model_type}' does not have plain sdpa attention over the full context, or "
            "use_remove_padding=false keeps its padding: its sequences cannot be shared; use 1"
        )
    rope = config.to_dict().get("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(
            f"{given}: rope_type={rope['rope_type']} depends on the longest position, which each rank would see "
            "otherwise; use 1"
        )


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """Exchanges all heads of this rank's positions for this rank's heads of all positions.

    Key heads are repeated until the ranks divide them.
    """
    # Divides the query's heads, as both do.
    heads = lcm(key.shape[1], group.size())
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    return tuple(Exchange.apply(x, group, 1, 2) for x in (query, key, value))


class Exchange(torch.autograd.Function):
    """Cuts dimension `split` into a part for each rank, and joins what the ranks send along `join`.

    Backward is the reverse.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
        """Exchanges the parts."""
        ctx.reverse = (group, join, split)
        return _exchanged(x, group, split, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Exchanges the gradient's parts the other way."""
        return _exchanged(gradient, *ctx.reverse), None, None, None


def _exchanged(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    parts = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()  # (ranks, ...)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received.movedim(0, join).flatten(join, join + 1)


def _in_compute_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to autocast's type, where it is on.

    Rotary positions make queries and keys float32, which the kernels do not take.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)
