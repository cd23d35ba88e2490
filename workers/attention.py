"""The attention of models that attend fully: rows packed one after another, each seeing itself only.

    rows       P0 A0 A1 | P1 P2 B0 B1        packed   P0 A0 A1 P1 P2 B0 B1        lengths 3 4, boundaries 0 3 7

A model takes it by name (`use_own_attention`), and a micro-batch's `Sequences` reach it as a keyword of the model's forward. Without them it is
transformers' sdpa, so shared prompts (which have a mask) and the model's own uses go on as before. Nothing is dropped out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "ppo_core"
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_KERNEL_HEAD = 256

VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The sequences that lie one after another in a packed micro-batch."""

    lengths: tuple[int, ...]  # tokens of each
    boundaries: Tensor  # (n + 1,) int32: 0 and the sums of the lengths so far

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Sequences:
        return cls(lengths=tuple(lengths), boundaries=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))

    def to(self, device: torch.device, non_blocking: bool = False) -> Sequences:
        return replace(self, boundaries=self.boundaries.to(device, non_blocking=non_blocking))


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
    """What transformers calls in each layer: query (B, H, L, D), key and value (B, H or fewer, L, D) -> (B, L, H, D)."""
    if sequences is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    query, key, value = _in_compute_type(query, key, value)
    return packed_attention(query, key, value, sequences, scaling).transpose(1, 2).contiguous(), None


def own_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """None where only causality is asked for; else sdpa's. What restarts in packed positions is said by `Sequences`, not by a dense mask."""
    if attention_mask is None and kwargs["q_length"] == kwargs["kv_length"]:
        return None
    return sdpa_mask(attention_mask=attention_mask, **kwargs)


AttentionInterface.register(NAME, own_attention)
AttentionMaskInterface.register(NAME, own_mask)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None) -> Tensor:
    """Causal attention within each sequence: query (1, H, total, D), key and value (1, H or fewer, total, D) -> as query.

    A kernel for sequences of various lengths where there is one (CUDA, two-byte types, equal heads of at most 256); else a loop.
    """
    fits = query.shape[-1] == value.shape[-1] <= LARGEST_KERNEL_HEAD
    if query.is_cuda and query.dtype in KERNEL_DTYPES and fits:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (total, heads, D)
        kernel = flash_kernel if find_spec_once("flash_attn") else torch_kernel
        return kernel(q, k, v, sequences.boundaries, max(sequences.lengths), scale).transpose(0, 1)[None]
    return loop_attention(query, key, value, sequences.lengths, scale)


def loop_attention(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float | None) -> Tensor:
    """`packed_attention` for any device and type, a sequence at a time."""
    parts = zip(*(x.split(list(lengths), dim=2) for x in (query, key, value)), strict=True)
    gqa = query.shape[1] != key.shape[1]
    outputs = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa) for q, k, v in parts]
    return torch.cat(outputs, dim=2)


def flash_kernel(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float | None) -> Tensor:
    """The package flash_attn: q (total, H, D), k and v (total, H or fewer, D) -> as q."""
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(q, k, v, boundaries, boundaries, longest, longest, softmax_scale=scale, causal=True)


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, longest: int, scale: float | None) -> Tensor:
    """PyTorch's own, shapes as for `flash_kernel`; a window of (-1, 0) is causal attention."""
    from torch.nn.attention.varlen import varlen_attn

    gqa = q.shape[1] != k.shape[1]
    return varlen_attn(
        q, k, v, boundaries, boundaries, longest, longest, scale=scale, window_size=(-1, 0), enable_gqa=gqa
    )


find_spec_once = cache(find_spec)


def _in_compute_type(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In autocast's type, where it is on: rotary positions make queries and keys float32, which the kernels do not take."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)
