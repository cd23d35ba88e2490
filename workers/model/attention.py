"""The attention of models that attend fully: over packed rows, and over the ranks of a sequence-parallel group.

    rows       P0 P1 A0 | P0 P1 B0 B1        packed   P0 P1 A0 B0 B1 0     segments P0 P1 | A0 | B0 B1 | 0
    queries    P0 P1 | A0 | B0 B1 | 0        keys     P0 P1 | P0 P1 A0 | P0 P1 B0 B1 | 0
    rank 0     P0 P1 A0, all heads   ->   all positions, half of the heads       (and back behind the attention)
    rank 1     B0 B1 0,  all heads   ->   all positions, the other half

A segment's queries are its last keys, and each sees the keys up to its own. The ranks of a sequence-parallel group
(Ulysses, arXiv:2309.14509) hold a part of the positions each, and exchange positions for heads around the attention. A
model takes it by name (`use_own_attention`), and a micro-batch's `Sequences` reach it as a keyword of its forward.
Invariant: without them it is transformers' sdpa, so that the model's own uses go on as before. Nothing is dropped out,
and no mask is made but, without a kernel, that of a block of segments at a time.

Rows that begin with the same tokens share them: their common part is computed once, and each row's own tokens attend to
it. In the order of their tokens rows share most with their neighbours. So one number a row says what is computed once
in a micro-batch: `shared`, the tokens that it has in common with the row before it.

    rows in order    a b c d e    shared 0        segments   ab | c | de | f | g     queries: its own tokens
                     a b c f      shared 3        keys of f  ab c f                  (the row up to there)
                     a b g        shared 2        keys of g  ab g

It may be the prompt of a group's samples, a system prompt, or what a template left of an episode's history. A token
costs the same wherever it is computed, and attention has fewer pairs; what sharing costs is that keys and values of a
path are copied to lie together, which `key_cost` weighs. Every token of every row is computed in exactly one segment of
its micro-batch.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, takewhile
from math import lcm
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from training.batch.batching import ceildiv
from training.batch.torch_functional import in_compute_type
from training.config import MicroBatching

NAME = "ppo_core"

# Pairs of queries and keys: of a short segment, and of a block of several.
SHORT, PAIRS = 1 << 18, 1 << 22


class Block(NamedTuple):
    """Holds segments of about one length, to attend together: S segments of at most n queries and m keys.

    Attributes:
        queries, keys: (S, n) and (S, m), their places, with any others behind the last.
        offsets: (S, 1), how many more keys than queries each has.
        real: (queries of the segments,), which of the S x n are theirs.
    """

    queries: Tensor
    keys: Tensor
    offsets: Tensor
    real: Tensor


@dataclass(frozen=True)
class Sequences:
    """Holds what attention must know of packed rows.

    Attributes:
        lengths, key_lengths: queries and keys of each segment.
        boundaries, key_boundaries: (segments + 1,) int32: 0 and the sums of the lengths so far.
        keys: (sum of key_lengths,) int64, the places of each segment's keys; None: the segments' own, in order.
        group: the sequence-parallel group, whose ranks hold a part of the positions each.
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    boundaries: Tensor
    key_boundaries: Tensor
    keys: Tensor | None = None
    group: dist.ProcessGroup | None = None

    @cached_property
    def blocks(self) -> tuple[list[Block], Tensor]:
        """Cuts the segments into blocks; returns them, and for each query its place in what they give, (total,)."""
        starts, key_starts = (
            [0, *accumulate(lengths)] for lengths in (self.lengths, self.key_lengths)
        )
        device = self.boundaries.device
        places = torch.arange(key_starts[-1], device=device) if self.keys is None else self.keys
        blocks, order = [], []
        for members in cut_blocks(self.lengths, self.key_lengths):
            lengths = [self.lengths[i] for i in members]
            n, m = max(lengths), max(self.key_lengths[i] for i in members)
            rows = [
                [starts[i], key_starts[i], self.key_lengths[i] - self.lengths[i]] for i in members
            ]
            first, first_key, offsets = to_device(torch.tensor(rows), device)[..., None].unbind(
                1
            )  # (S, 1)
            queries = (first + torch.arange(n, device=device)).clamp(max=starts[-1] - 1)
            keys = (first_key + torch.arange(m, device=device)).clamp(max=key_starts[-1] - 1)
            real = torch.cat(
                [torch.arange(i * n, i * n + length) for i, length in enumerate(lengths)]
            )
            blocks.append(Block(queries, places[keys], offsets, to_device(real, device)))
            order += [torch.arange(starts[i], starts[i + 1]) for i in members]
        return blocks, to_device(torch.cat(order).argsort(), device)

    @classmethod
    def of(cls, lengths: Sequence[int], keys: Sequence[Tensor] | None = None) -> Self:
        """Describes segments of these lengths, and for each the places of its keys, the last of which are its own."""
        key_lengths = tuple(lengths if keys is None else map(len, keys))
        places = None if keys is None else torch.cat(list(keys))
        return cls(
            tuple(lengths), key_lengths, _boundaries(lengths), _boundaries(key_lengths), places
        )

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments by which a transformers model hands this on to its attention.

        It makes no mask where one of four dimensions is given, which is not read here; else it would look into the
        positions for packed rows, and the host would wait for the answer.
        """
        return {
            "sequences": self,
            "attention_mask": self.boundaries.new_ones(1, 1, 1, 1, dtype=torch.bool),
        }


def _boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def to_device(thing: Any, device: torch.device) -> Any:
    """Copies a tensor, or a record with its tensors, to the device; other things stay.

    To a GPU from pinned memory, so that the host does not wait for it.
    """
    if isinstance(thing, Tensor):
        return (thing.pin_memory() if device.type == "cuda" else thing).to(
            device, non_blocking=True
        )
    if not is_dataclass(thing):
        return thing
    return replace(thing, **{name: to_device(own, device) for name, own in vars(thing).items()})  # type: ignore[type-var]


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
        # The mask of `model_inputs`, which came through alone.
        if (
            attention_mask is not None
            and attention_mask.shape == (1, 1, 1, 1)
            and query.shape[2] > 1
        ):
            raise ValueError(
                "this model does not hand `sequences` on to its attention, so its rows cannot be packed"
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
        output = exchange(output, sequences.group, 2, 1)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, own_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Attends causally along each segment's path: query (1, H, total, D), key and value (1, H or fewer, total, D).

    Returns the output in query's shape. Takes a kernel for sequences of various lengths where there is one; else
    blocks of them.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # (total, heads, D)
    if not _has_kernel(q, v):
        return block_attention(q, k, v, sequences, scale).transpose(0, 1)[None]
    if sequences.keys is not None:
        k, v = (TakeKeys.apply(x, sequences.keys) for x in (k, v))
    return torch_kernel(q, k, v, sequences, scale).transpose(0, 1)[None]


class TakeKeys(torch.autograd.Function):
    """Copies rows of keys or values (total, heads, D) to where segments read them; gradients add up in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        """Returns the rows at `places`."""
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Adds up what every copy of a row brings."""
        (places,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=torch.float32)
        return total.index_add_(0, places, gradient.float()).to(gradient.dtype), None


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Attends on any device and in any type, some segments at a time: q (total, H, D), k and v (total, H or fewer, D).

    It computes in float32 where they are short: a CPU's backward pass in bfloat16 is then several times slower.
    """
    outputs, gqa, kind = [], q.shape[1] != k.shape[1], q.device.type
    blocks, order = sequences.blocks
    for queries, keys, offsets, real in blocks:
        (count, n), m = queries.shape, keys.shape[1]
        dtype = torch.float32 if n * m <= SHORT else q.dtype
        query = (
            q.index_select(0, queries.flatten())
            .to(dtype)
            .unflatten(0, queries.shape)
            .transpose(1, 2)
        )
        taken = (
            TakeKeys.apply(x, keys.flatten()).to(dtype).unflatten(0, keys.shape) for x in (k, v)
        )
        key, value = (x.transpose(1, 2) for x in taken)
        alone = count == 1 and n == m
        places = torch.arange(max(n, m), device=q.device)
        seen = (
            None if alone else (places[:m] <= (places[:n] + offsets)[..., None])[:, None]
        )  # (S, 1, n, m)
        # Autocast would cast them.
        with (
            torch.autocast(kind, enabled=False)
            if torch.amp.is_autocast_available(kind)
            else nullcontext()
        ):
            output = scaled_dot_product_attention(
                query, key, value, seen, is_causal=alone, scale=scale, enable_gqa=gqa
            )
        outputs.append(output.transpose(1, 2).flatten(0, 1).index_select(0, real).to(q.dtype))
    return torch.cat(outputs).index_select(0, order)


def cut_blocks(lengths: Sequence[int], key_lengths: Sequence[int]) -> list[list[int]]:
    """Lists segments that may attend together: in all at most twice the pairs they need, and PAIRS of them.

    Every shape is prepared anew by a CPU's matrix products, so that one at a time would be slow.
    """
    blocks: list[list[int]] = []
    needed = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-key_lengths[i], -lengths[i])):
        pairs = lengths[i] * key_lengths[i]
        block = [*blocks[-1], i] if blocks else [i]
        padded = len(block) * max(lengths[j] for j in block) * key_lengths[block[0]]
        if blocks and padded <= min(PAIRS, 2 * (needed + pairs)):
            blocks[-1], needed = block, needed + pairs
        else:
            blocks.append([i])
            needed = pairs
    return blocks


def torch_kernel(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float | None
) -> Tensor:
    """Runs PyTorch's flash attention, with shapes as for `block_attention`; it counts causality from the last key."""
    from torch.nn.attention.varlen import varlen_attn

    boundaries = (sequences.boundaries, sequences.key_boundaries)
    longest, gqa = (max(sequences.lengths), max(sequences.key_lengths)), q.shape[1] != k.shape[1]
    # A window of (-1, 0) is causal attention.
    return varlen_attn(
        q, k, v, *boundaries, *longest, scale=scale, window_size=(-1, 0), enable_gqa=gqa
    )


def _has_kernel(q: Tensor, v: Tensor) -> bool:
    """Says whether a kernel takes these: it wants CUDA from Ampere on, two-byte types, heads of one size up to 256."""
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] == v.shape[-1] in range(
        8, 257, 8
    )
    return q.is_cuda and fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def check_shared_sequences(module: nn.Module, ranks: int) -> None:
    """Raises ValueError where `ranks` ranks cannot share this model's sequences."""
    config, given = module.config.get_text_config(), f"ulysses_sequence_parallel_size={ranks}"
    heads = config.num_attention_heads
    if heads % ranks:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"{given} does not divide the model's {heads} attention heads; use one of {allowed}"
        )
    if config._attn_implementation != NAME:
        missing = "does not have plain sdpa attention over the full context, or use_remove_padding=false keeps padding"
        raise ValueError(
            f"{given}: model type '{config.model_type}' {missing}: its sequences cannot be shared; use 1"
        )
    if kind := varies_with_length(module):
        raise ValueError(
            f"{given}: rope_type={kind} depends on the longest position, which ranks see otherwise; use 1"
        )


def varies_with_length(module: nn.Module) -> str | None:
    """Names the model's rope_type where it turns positions by the longest one in a batch; None for others."""
    rope = module.config.get_text_config().to_dict().get("rope_parameters") or {}
    return rope["rope_type"] if rope.get("rope_type") in ("dynamic", "longrope") else None


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Exchanges all heads of this rank's positions for this rank's heads of all positions.

    Key heads are repeated until the ranks divide them.
    """
    # Divides the query's heads, as both do.
    heads = lcm(key.shape[1], group.size())
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    return tuple(exchange(x, group, 1, 2) for x in (query, key, value))


def exchange(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    """Cuts dimension `split` into a part for each rank, and joins what the ranks send along `join`.

    Backward is the reverse.
    """
    parts = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()  # (ranks, ...)
    return (
        all_to_all_single_autograd(parts, None, None, group)
        .movedim(0, join)
        .flatten(join, join + 1)
    )


# What rows share

# Copied keys and values whose memory, forward and backward, is about that of a token in a layer.
KEYS_PER_TOKEN = 16

# Rows in order, each with the number of tokens that it shares with the row before it.
MicroBatch = list[tuple[int, int]]


class Segments(NamedTuple):
    """Holds a micro-batch's tokens, laid out one segment behind the other.

    Attributes:
        parts: which tokens each segment holds: of which row, from where, and how many.
        keys: for each segment the places of its row's tokens up to its end.
        places: for each row, in the micro-batch's order, the places of its tokens.
    """

    parts: list[tuple[int, int, int]]
    keys: list[np.ndarray]
    places: list[np.ndarray]


def order_rows(tokens: Sequence[np.ndarray], key_cost: float | None) -> MicroBatch:
    """Orders rows (each (length,) integers) so that those that begin alike are neighbours.

    Args:
        key_cost: what a token's copied key and value cost, in tokens computed (`workers.model.forward.key_cost`); a row
            shares what it has in common with its neighbour where that is more than its copies cost. None: nothing.
    """
    if key_cost is None:
        return [(row, 0) for row in range(len(tokens))]
    # Big-endian bytes are ordered as the numbers are.
    keys = [row.astype(">u4").tobytes() for row in tokens]
    order = sorted(range(len(tokens)), key=keys.__getitem__)
    shared = [0, *(_common(tokens[before], tokens[row]) for before, row in pairwise(order))]
    return [
        (row, n if n > key_cost * len(tokens[row]) else 0)
        for row, n in zip(order, shared, strict=True)
    ]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Counts the tokens that two rows begin with alike."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def plan_packed(
    order: MicroBatch, lengths: Sequence[int], limits: MicroBatching
) -> list[MicroBatch]:
    """Cuts ordered rows into few micro-batches within the limits, which count a shared token once; the largest first.

    KEYS_PER_TOKEN keys that segments read count as a token too, where they are more: they are copied, layer by layer.
    Rows that share something stay together as long as they fit; a row above the limit is a micro-batch of its own.
    """
    most_rows = limits.micro_batch_size or len(order)
    most = limits.max_token_len or sum(lengths)
    bins: list[tuple[int, MicroBatch]] = []
    for tokens, run in sorted(_runs(order, lengths, most, most_rows), key=lambda run: -run[0]):
        for i, (used, rows) in enumerate(bins):
            if used + tokens <= most and len(rows) + len(run) <= most_rows:
                bins[i] = (used + tokens, rows + run)
                break
        else:
            bins.append((tokens, run))
    return [rows for _, rows in sorted(bins, key=lambda packed: -packed[0])]


def _runs(
    order: MicroBatch, lengths: Sequence[int], most: int, most_rows: int
) -> list[tuple[int, MicroBatch]]:
    """Lists runs of neighbours that share something, with their tokens, cut evenly where they are above the limits."""
    starts = [place for place, (_, shared) in enumerate(order) if not shared]
    cut: list[tuple[int, MicroBatch]] = []
    for run in (order[start:stop] for start, stop in pairwise([*starts, len(order)])):
        total = _size(
            sum(lengths[row] - shared for row, shared in run), sum(lengths[row] for row, _ in run)
        )
        parts = max(ceildiv(total, most), ceildiv(len(run), most_rows))
        own, keys, part = 0, 0, MicroBatch()
        for row, shared in run:
            more = lengths[row] - shared
            full = _size(own + more, keys + lengths[row]) > most or len(part) == most_rows
            if part and (full or (more and _size(own, keys) >= total / parts)):
                cut.append((_size(own, keys), part))
                own, keys, part, more, shared = 0, 0, MicroBatch(), lengths[row], 0
            own, keys, part = own + more, keys + lengths[row], [*part, (row, shared)]
        cut.append((_size(own, keys), part))
    return cut


def _size(own: int, keys: int) -> int:
    return max(own, ceildiv(keys, KEYS_PER_TOKEN))


def cut_segments(micro_batch: MicroBatch, lengths: Sequence[int]) -> Segments:
    """Cuts the rows of a micro-batch into segments, wherever one of them leaves the others."""
    segments = Segments([], [], [])
    # The segments of the row at hand: where each ends in the row, and the places of its tokens.
    path: list[tuple[int, np.ndarray]] = []
    total = 0
    for number, (row, shared) in enumerate(micro_batch):
        path = [(stop, places) for stop, places in path if stop <= shared]
        # Where later rows leave this one, as long as they share more of it than the row before does.
        later = takewhile(shared.__lt__, (n for _, n in micro_batch[number + 1 :]))
        for start, stop in pairwise(
            sorted({shared, *accumulate(later, min, initial=lengths[row])})
        ):
            path.append((stop, np.arange(total, total + stop - start)))
            total += stop - start
            segments.parts.append((row, start, stop - start))
            segments.keys.append(_joined(path))
        segments.places.append(_joined(path))
    return segments


def _joined(path: list[tuple[int, np.ndarray]]) -> np.ndarray:
    return np.concatenate([places for _, places in path])
