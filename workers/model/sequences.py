"""What attention must know of packed rows: where segments lie, and which keys each of them reads.

    rows       P0 P1 A0 | P0 P1 B0 B1
    packed     P0 P1 A0 B0 B1
    segments   P0 P1 | A0 | B0 B1
    queries    P0 P1 | A0 | B0 B1
    keys       P0 P1 | P0 P1 A0 | P0 P1 B0 B1

Where no kernel takes segments of various lengths, several of about one length attend together as a
block.
Invariant: a segment's queries are its last keys, and each sees the keys up to its own place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

# Pairs of a query and a key in a block of several segments.
MOST_PAIRS = 1 << 22


class Block(NamedTuple):
    """Holds S segments of at most n queries and m keys, which attend together.

    Attributes:
        queries, keys: (S, n) and (S, m), their places in the packed rows; behind the last come any
            others.
        offsets: (S, 1), how many more keys than queries each segment has.
        real: (queries of the segments,), which of the S * n places hold a query of a segment.
    """

    queries: Tensor
    keys: Tensor
    offsets: Tensor
    real: Tensor


@dataclass(frozen=True)
class Sequences:
    """Describes the segments of packed rows, for attention.

    Attributes:
        lengths, key_lengths: number of queries and of keys of each segment.
        boundaries, key_boundaries: (segments + 1,) int32: 0 and the sums of the lengths so far.
        keys: (sum of key_lengths,) int64, the places of each segment's keys; None: the segments'
            own, in order.
        group: the sequence-parallel group, whose ranks hold a part of the positions each.
        tells_boundaries: layers that keep a state are told where a segment begins.
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    boundaries: Tensor
    key_boundaries: Tensor
    keys: Tensor | None = None
    group: dist.ProcessGroup | None = None
    tells_boundaries: bool = False

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        keys: Sequence[Tensor] | None = None,
        *,
        tells_boundaries: bool = False,
    ) -> Self:
        """Describes segments of these lengths.

        Args:
            keys: for each segment the places of its keys, the last of which are its own; None: its
                own alone.
            tells_boundaries: for a model whose layers keep a state; its segments are whole rows.
        """
        if keys is None:
            key_lengths = tuple(lengths)
            places = None
        else:
            key_lengths = tuple(len(segment_keys) for segment_keys in keys)
            places = torch.cat(list(keys))
        return cls(
            lengths=tuple(lengths),
            key_lengths=key_lengths,
            boundaries=_boundaries(lengths),
            key_boundaries=_boundaries(key_lengths),
            keys=places,
            tells_boundaries=tells_boundaries,
        )

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keywords by which a transformers model hands this on to its attention.

        transformers makes no mask where one of four dimensions is given, which is not read here;
        else it would look into the positions for packed rows, and the host would wait for the
        answer.
        """
        mask = self.boundaries.new_ones(1, 1, 1, 1, dtype=torch.bool)
        inputs = {"sequences": self, "attention_mask": mask}
        if self.tells_boundaries:
            # The names that transformers has for them: gated delta nets take the first, Mamba and
            # short convolutions the second.
            inputs["cu_seq_lens_q"] = self.boundaries
            inputs["seq_idx"] = self.segment_of_each_token
        return inputs

    @cached_property
    def segment_of_each_token(self) -> Tensor:
        """Numbers the segments at their tokens: (1, total) int32."""
        numbers = []
        for number, length in enumerate(self.lengths):
            numbers.append(torch.full((length,), number, dtype=torch.int32))
        return to_device(torch.cat(numbers)[None], self.boundaries.device)

    @cached_property
    def blocks(self) -> tuple[list[Block], Tensor]:
        """Cuts the segments into blocks.

        Returns: the blocks; and for each query its place among the outputs of all blocks, (total,).
        """
        starts = [0, *accumulate(self.lengths)]
        key_starts = [0, *accumulate(self.key_lengths)]
        blocks = []
        order = []
        for members in cut_blocks(self.lengths, self.key_lengths):
            blocks.append(self._block(members, starts, key_starts))
            order += [torch.arange(starts[i], starts[i + 1]) for i in members]
        return blocks, to_device(torch.cat(order).argsort(), self.boundaries.device)

    def _block(
        self, members: Sequence[int], starts: Sequence[int], key_starts: Sequence[int]
    ) -> Block:
        """Lays out the segments of these numbers, padded to the longest of them."""
        device = self.boundaries.device
        n = max(self.lengths[i] for i in members)
        m = max(self.key_lengths[i] for i in members)
        rows = []
        for i in members:
            rows.append([starts[i], key_starts[i], self.key_lengths[i] - self.lengths[i]])
        columns = to_device(torch.tensor(rows), device)[..., None]  # (S, 3, 1)
        first_query, first_key, offsets = columns.unbind(1)  # (S, 1) each
        last_query = starts[-1] - 1
        last_key = key_starts[-1] - 1
        queries = (first_query + torch.arange(n, device=device)).clamp(max=last_query)
        keys = (first_key + torch.arange(m, device=device)).clamp(max=last_key)
        if self.keys is not None:
            keys = self.keys[keys]
        real = []
        for number, i in enumerate(members):
            real.append(torch.arange(number * n, number * n + self.lengths[i]))
        return Block(queries, keys, offsets, to_device(torch.cat(real), device))


def _boundaries(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def cut_blocks(lengths: Sequence[int], key_lengths: Sequence[int]) -> list[list[int]]:
    """Lists which segments attend together: at most twice the pairs that they need, and MOST_PAIRS.

    A CPU prepares its matrix products anew for each shape, so that one segment at a time would be
    slow.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-key_lengths[i], -lengths[i]))
    blocks: list[list[int]] = []
    needed = 0
    for i in longest_first:
        pairs = lengths[i] * key_lengths[i]
        if blocks:
            block = [*blocks[-1], i]
            padded = len(block) * max(lengths[j] for j in block) * key_lengths[block[0]]
            if padded <= min(MOST_PAIRS, 2 * (needed + pairs)):
                blocks[-1] = block
                needed += pairs
                continue
        blocks.append([i])
        needed = pairs
    return blocks


def to_device(thing: Any, device: torch.device) -> Any:
    """Copies a tensor, or a dataclass with its tensors, to the device; others stay as they are.

    Copies to a GPU start from pinned memory, so that the host does not wait for them.
    """
    if isinstance(thing, Tensor):
        source = thing.pin_memory() if device.type == "cuda" else thing
        return source.to(device, non_blocking=True)
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    moved = {field.name: to_device(getattr(thing, field.name), device) for field in fields(thing)}
    return replace(thing, **moved)
