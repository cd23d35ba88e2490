"""How rows are laid out for the forward pass: packed, where what several begin with alike is computed once, or padded.

Packed rows lie in segments one behind the other, without padding and without a mask (which: prefix_tree.py; how they
attend: attention.py). Rows that a model does not take packed are padded on the right.

    rows    P0 P1 A0 A1 | P0 P1 B0        packed    P0 P1 | A0 A1 | B0        position_ids  0 1 2 3 2

A token's log-prob comes from the hidden state before it, at its logit position: P1's state predicts both A0 and B0.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.protocol import DataProto
from data.texts import say
from training.batch.batching import plan_padded
from training.config import MicroBatching
from workers.model.attention import Sequences, tensors_on, to_device
from workers.model.prefix_tree import MicroBatch, cut_segments, order_rows, plan_packed
from workers.ranks.distributed import SumOfParts, max_over_ranks

# What a forward pass reads of a batch.
FORWARD_FIELDS = ("prompts", "responses", "response_mask", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """Says how a module is run: compute type, device, and how rows are laid out."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    strip_padding: bool = True
    # Rows lie one behind the other: for models that `use_own_attention`.
    pack_rows: bool = False
    # What packed rows share costs so much (`order_rows`); None: they share nothing.
    key_cost: float | None = None
    # The sequence-parallel group of this rank: ranks that share each sequence, with the same rows.
    sequence_group: dist.ProcessGroup | None = None

    @property
    def sequence_ranks(self) -> int:
        """Returns the size of the sequence-parallel group."""
        return 1 if self.sequence_group is None else self.sequence_group.size()

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in `dtype` within the block."""
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)


@dataclass(kw_only=True)
class ForwardBatch:
    """Holds one micro-batch on the device: T rows of at most L tokens, or one of packed rows; N tokens were sampled.

    Attributes:
        input_ids, position_ids: (T, L).
        attention_mask: (T, L), of rows with padding on both sides; None: causal, with padding on the right.
        logit_positions: (N,) in T * L, the state that predicts each sampled token.
        labels: (N,) the sampled token.
        rows, columns: (N,) the row of the batch it belongs to, and its column among the responses.
        sequences: of packed rows, or of a sequence-parallel group.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    attention_mask: Tensor | None = None
    sequences: Sequences | None = None

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of a transformers model."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False}
        if self.sequences is None:
            return inputs | {"attention_mask": self.attention_mask}
        return inputs | self.sequences.model_inputs()

    def to(self, device: torch.device) -> Self:
        """Returns a copy on the device."""
        return replace(self, **tensors_on(device, self), sequences=self.sequences and self.sequences.to(device))


class RowTokens(NamedTuple):
    """Holds one row's tokens, (n,) int64, the places of those that were sampled, and their columns in `responses`."""

    ids: Tensor
    sampled: Tensor
    columns: Tensor


def row_tokens(data: DataProto, strip_padding: bool) -> list[RowTokens]:
    """Takes the rows of `data` apart; without `strip_padding` a row's padding is a part of it."""
    width = data.batch["prompts"].shape[1]
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()  # (B, P + R)
    real = data.batch["attention_mask"].bool()
    sampled = torch.zeros_like(real)
    sampled[:, width:] = data.batch["response_mask"].bool() & real[:, width:]
    if "observation_mask" in data.batch:
        sampled[:, width:] |= data.batch["observation_mask"].bool()
    real = real | (not strip_padding)
    if not (prompted := real[:, :width].any(dim=1)).all():
        raise ValueError(say("no_prompt", rows=(~prompted).nonzero().flatten().tolist()[:8]))
    return [
        RowTokens(row[kept], own[kept].nonzero().squeeze(1), own.nonzero().squeeze(1) - width)
        for row, kept, own in zip(ids, real, sampled, strict=True)
    ]


def plan_batch(rows: Sequence[RowTokens], settings: ForwardSettings, limits: MicroBatching) -> list[MicroBatch]:
    """Plans micro-batches over the rows."""
    lengths = [len(row.ids) for row in rows]
    if settings.pack_rows:
        return plan_packed(order_rows([row.ids.numpy() for row in rows], settings.key_cost), lengths, limits)
    return [[(row, 0) for row in micro_batch] for micro_batch in plan_padded(lengths, limits)]


def build_forward_batch(
    rows: Sequence[RowTokens], shared: Sequence[int], settings: ForwardSettings, attention_mask: Tensor
) -> ForwardBatch:
    """Lays the rows of one micro-batch out, each of which begins with `shared` tokens of the row before it.

    Where padding is not stripped, `attention_mask` (rows, P + R) masks it. In a sequence-parallel group each rank gets
    its part of the positions, with the sampled tokens predicted there.
    """
    if settings.pack_rows:
        batch = _packed(rows, shared, settings.sequence_ranks)
        return batch if settings.sequence_group is None else _sequence_shard(batch, settings.sequence_group)
    batch, mask = _padded(rows), attention_mask.long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return batch if settings.strip_padding else replace(batch, attention_mask=mask, position_ids=positions)


def _packed(rows: Sequence[RowTokens], shared: Sequence[int], multiple_of: int) -> ForwardBatch:
    """Puts the rows' segments one behind the other: input_ids (1, total).

    What makes the total a multiple is a segment of its own.
    """
    segments = cut_segments(list(enumerate(shared)), [len(row.ids) for row in rows])
    ids = [rows[row].ids[start : start + n] for row, start, n in segments.parts]
    positions = [torch.arange(start, start + n) for _, start, n in segments.parts]
    lengths, keys = [n for _, _, n in segments.parts], [torch.from_numpy(places) for places in segments.keys]
    total = sum(lengths)
    if missing := -total % multiple_of:
        ids, positions = [*ids, torch.zeros(missing, dtype=torch.long)], [*positions, torch.arange(missing)]
        lengths, keys = [*lengths, missing], [*keys, torch.arange(total, total + missing)]
    sampled = _sampled_tokens(rows, [torch.from_numpy(places) for places in segments.places])
    tokens = {"input_ids": torch.cat(ids)[None], "position_ids": torch.cat(positions)[None], **sampled}
    return ForwardBatch(**tokens, sequences=Sequences.of(lengths, keys if any(shared) else None))


def _padded(rows: Sequence[RowTokens]) -> ForwardBatch:
    """Puts rows one below the other, padded on the right."""
    ids = pad_sequence([row.ids for row in rows], batch_first=True)
    places = torch.arange(ids.numel()).view_as(ids)
    # Padding continues the positions: numbers that start again would be read as packed sequences.
    positions = places[:1].repeat(len(rows), 1)
    return ForwardBatch(input_ids=ids, position_ids=positions, **_sampled_tokens(rows, list(places)))


def _sampled_tokens(rows: Sequence[RowTokens], places: Sequence[Tensor]) -> dict[str, Tensor]:
    """Makes `ForwardBatch`'s fields of the sampled tokens; `places` says where each row's tokens lie."""
    return {
        "logit_positions": torch.cat([place[row.sampled - 1] for row, place in zip(rows, places, strict=True)]),
        "labels": torch.cat([row.ids[row.sampled] for row in rows]),
        "rows": torch.cat([torch.full((len(row.sampled),), i) for i, row in enumerate(rows)]),
        "columns": torch.cat([row.columns for row in rows]),
    }


def _sequence_shard(whole: ForwardBatch, group: dist.ProcessGroup) -> ForwardBatch:
    """Takes this rank's part of packed rows; the sequences stay whole, as the attention sees all positions."""
    assert whole.sequences is not None
    width = whole.input_ids.shape[1] // group.size()
    start = group.rank() * width
    own = slice(start, start + width)
    mine = (whole.logit_positions >= start) & (whole.logit_positions < own.stop)
    parts = {name: getattr(whole, name)[:, own] for name in ("input_ids", "position_ids")}
    parts |= {name: getattr(whole, name)[mine] for name in ("labels", "rows", "columns")}
    parts["logit_positions"] = whole.logit_positions[mine] - start
    return replace(whole, **parts, sequences=replace(whole.sequences, group=group))


def iter_micro_batches(
    data: DataProto, settings: ForwardSettings, limits: MicroBatching
) -> Iterator[tuple[Tensor, DataProto, ForwardBatch]]:
    """Yields (rows, data[rows], their layout on the device); every row of `data` comes exactly once.

    With several ranks all get the same number of micro-batches, since each runs collectives: one that has fewer repeats
    its last one's first row with nothing sampled in it.
    """
    tokens = row_tokens(data, settings.strip_padding)
    plan = plan_batch(tokens, settings, limits)
    missing = int(max_over_ranks(torch.tensor(len(plan)))) - len(plan)
    for number, micro_batch in enumerate([*plan, *[plan[-1][:1]] * missing]):
        rows = torch.tensor([row for row, _ in micro_batch])
        micro, own = data.select_idxs(rows), [tokens[row] for row, _ in micro_batch]
        if number >= len(plan):
            rows, own = rows[:0], [own[0]._replace(sampled=own[0].sampled[:0], columns=own[0].columns[:0])]
            micro.batch["response_mask"] = torch.zeros_like(micro.batch["response_mask"])
        shared = [shared for _, shared in micro_batch]
        yield rows, micro, build_forward_batch(own, shared, settings, micro.batch["attention_mask"]).to(settings.device)


def loss_fields(micro: DataProto, device: torch.device) -> dict[str, Tensor]:
    """Copies to the device what a loss reads of a micro-batch: all but what its layout was made of."""
    layout = {*FORWARD_FIELDS} - {"response_mask"}
    return {name: to_device(tensor, device) for name, tensor in micro.batch.items() if name not in layout}


def scatter_tokens(values: Tensor, inputs: ForwardBatch, shape: Sequence[int]) -> Tensor:
    """Scatters per-token values (N,) to their places among zeros (rows, response_len); differentiable.

    The ranks of a sequence-parallel group all get the whole, and must all compute the same loss from it.
    """
    scattered = values.new_zeros(tuple(shape)).index_put((inputs.rows, inputs.columns), values)
    group = None if inputs.sequences is None else inputs.sequences.group
    return scattered if group is None else SumOfParts.apply(scattered, group)


def read_rows(read: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Puts micro-batches' (rows, values (rows, R)) in the order of the rows, on the CPU: only here the host waits."""
    rows, values = torch.cat([rows for rows, _ in read]), torch.cat([values[: len(rows)] for rows, values in read])
    ordered = values.new_empty(values.shape, device="cpu")
    ordered[rows] = values.cpu()
    return ordered
