"""The attention of models that attend fully: over packed rows, and over sequence-parallel ranks.

A model takes it by name (`use_packed_attention`), and a micro-batch's `Sequences` (sequences.py)
reach it as a keyword of the model's forward. Invariant: without them it is transformers' sdpa, so
that the model's other uses, such as generation, go on as before. Nothing is dropped out.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from training.batch.head import in_compute_type
from workers.model.block_attention import TakeKeys, block_attention
from workers.model.sequence_parallel import to_heads, to_positions
from workers.model.sequences import Sequences

# The name under which transformers knows this attention.
NAME = "ppo_core"
# `Sequences.model_inputs` hands on a mask of this shape, which nothing reads.
UNREAD_MASK_SHAPE = (1, 1, 1, 1)
# Sizes of a head that the kernel takes.
KERNEL_HEAD_SIZES = range(8, 257, 8)


def use_packed_attention(module: nn.Module) -> bool:
    """Makes a model attend through this file; false where its code has its attention built in."""
    module.set_attn_implementation(NAME)
    return module.config.get_text_config()._attn_implementation == NAME


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequences: Sequences | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends in a layer: query (B, H, L, D), key and value (B, H or fewer, L, D).

    transformers calls it.

    Returns: the output (B, L, H, D), and None for the weights.

    Raises:
        ValueError: the model hands on the mask of packed rows, but not their `sequences`.
    """
    if sequences is None:
        mask_came_alone = attention_mask is not None and attention_mask.shape == UNREAD_MASK_SHAPE
        if mask_came_alone and query.shape[2] > 1:
            raise ValueError(
                "this model does not hand `sequences` on to its attention, so its rows cannot be "
                "packed"
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # Rotary positions make queries and keys float32, which the kernels do not take.
    query, key, value = in_compute_type(query, key, value)
    if sequences.group is not None:
        query, key, value = to_heads(query, key, value, sequences.group)
    output = packed_attention(query, key, value, sequences, scaling)
    if sequences.group is not None:
        output = to_positions(output, sequences.group)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Attends causally along each segment: query (1, H, T, D), key and value (1, H or fewer, T, D).

    Takes a kernel for sequences of various lengths where there is one; else blocks of them.

    Returns: the output, in query's shape.
    """
    q = query[0].transpose(0, 1)  # (total, H, D)
    k = key[0].transpose(0, 1)
    v = value[0].transpose(0, 1)
    if not _has_kernel(q, v):
        output = block_attention(q, k, v, sequences, scale)
    else:
        if sequences.keys is not None:
            k = TakeKeys.apply(k, sequences.keys)
            v = TakeKeys.apply(v, sequences.keys)
        output = torch_kernel(q, k, v, sequences, scale)
    return output.transpose(0, 1)[None]


def torch_kernel(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Runs PyTorch's flash attention, with shapes as for `block_attention`.

    It counts causality from the last key.
    """
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(
        q,
        k,
        v,
        sequences.boundaries,
        sequences.key_boundaries,
        max(sequences.lengths),
        max(sequences.key_lengths),
        scale=scale,
        # Causal attention.
        window_size=(-1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    """Checks whether the kernel takes these: CUDA, Ampere on, two bytes, heads of one size."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return False
    if q.shape[-1] != v.shape[-1] or q.shape[-1] not in KERNEL_HEAD_SIZES:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)
