"""The layout of a micro-batch's rows: packed one behind the other, or padded on the right.

Packed rows lie in segments, without padding or mask (which segments: shared_prefix.py; how they
attend: attention.py):

    rows    P0 P1 A0 A1 | P0 P1 B0      packed    P0 P1 | A0 A1 | B0      position_ids  0 1 2 3 2

A token's log-prob comes from the hidden state before it, at its logit position: P1's state predicts
both A0 and B0.
Invariant: only sampled tokens have a logit position, so that the head runs on the states that
predict them, and on no others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.protocol import DataProto
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_fields import PREDICTED
from workers.model.router_replay import RouterPass, missing_choice
from workers.model.sequences import Sequences
from workers.model.shared_prefix import PackedRow, cut_segments


@dataclass(kw_only=True)
class ForwardBatch:
    """Holds one micro-batch: T rows of at most L tokens, or one of packed rows; N tokens sampled.

    Attributes:
        input_ids, position_ids: (T, L).
        attention_mask: (T, L), of rows with padding on both sides; None: causal, with padding on
            the right.
        logit_positions: (N,) in T * L, the state that predicts each sampled token.
        labels: (N,) the sampled token.
        rows, columns: (N,) the row of the batch it belongs to, and its column among the responses.
        sequences: of packed rows, or of a sequence-parallel group.
        temperature: of the distribution that the tokens were sampled from.
        router_pass: which experts each of the T * L tokens gets; None: the model's own choice.
        candidates: (N, K) int64, token ids whose log-probs are wanted beside each sampled token's.
    """

    input_ids: Tensor
    position_ids: Tensor
    logit_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    attention_mask: Tensor | None = None
    sequences: Sequences | None = None
    temperature: float = 1.0
    router_pass: RouterPass | None = None
    candidates: Tensor | None = None

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of a transformers model."""
        inputs = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.sequences is None:
            return inputs | {"attention_mask": self.attention_mask}
        return inputs | self.sequences.model_inputs()


@dataclass(frozen=True)
class RowTokens:
    """Holds one row's tokens.

    Attributes:
        ids: (n,) int64.
        sampled: (sampled tokens,) the places in `ids` of those that are to be predicted.
        columns: (sampled tokens,) their columns in `responses`.
        experts: (n, layers, experts of a token) what the engine chose, where the batch has it.
    """

    ids: Tensor
    sampled: Tensor
    columns: Tensor
    experts: Tensor | None = None

    def without_sampled(self) -> "RowTokens":
        """Returns the row with nothing sampled in it."""
        return replace(self, sampled=self.sampled[:0], columns=self.columns[:0])


def row_tokens(data: DataProto, strip_padding: bool) -> list[RowTokens]:
    """Takes the rows of `data` apart; without `strip_padding` a row's padding is a part of it.

    Raises:
        ValueError: a row has no token that its first sampled one could be predicted from.
    """
    prompt_length = data.batch["prompts"].shape[1]
    ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()  # (B, P + R)
    real = data.batch["attention_mask"].bool()
    predicted = data.batch["response_mask"].bool() & real[:, prompt_length:]
    if "observation_mask" in data.batch:
        predicted = predicted | data.batch["observation_mask"].bool()
    for name in data.meta_info.get(PREDICTED, ()):
        predicted = predicted | data.batch[name].bool()
    sampled = torch.zeros_like(real)
    sampled[:, prompt_length:] = predicted
    kept = real if strip_padding else torch.ones_like(real)
    has_prompt = kept[:, :prompt_length].any(dim=1)
    if not has_prompt.all():
        first_rows = (~has_prompt).nonzero().flatten().tolist()[:8]
        raise ValueError(
            f"rows {first_rows} have no prompt token in attention_mask, which their first sampled "
            "token would be predicted from; attend a begin-of-text or padding token"
        )
    experts = data.batch.get("routed_experts", None)  # (B, P + R, layers, k)
    rows = []
    for number, (row_ids, row_kept, row_sampled) in enumerate(zip(ids, kept, sampled, strict=True)):
        rows.append(
            RowTokens(
                ids=row_ids[row_kept],
                sampled=row_sampled[row_kept].nonzero().squeeze(1),
                columns=row_sampled.nonzero().squeeze(1) - prompt_length,
                experts=None if experts is None else experts[number][row_kept],
            )
        )
    return rows


def build_forward_batch(
    rows: Sequence[RowTokens],
    shared: Sequence[int],
    settings: ForwardSettings,
    attention_mask: Tensor,
) -> ForwardBatch:
    """Lays the rows of one micro-batch out; each begins with `shared` tokens of the row before it.

    Where padding is not stripped, `attention_mask` (rows, P + R) masks it. In a sequence-parallel
    group each rank gets its part of the positions, with the sampled tokens that are predicted
    there.
    """
    if settings.pack_rows:
        batch = _pack(
            rows,
            shared,
            multiple_of=settings.sequence_ranks,
            tells_boundaries=settings.tells_boundaries,
        )
        if settings.sequence_group is None:
            return batch
        return _take_rank_part(batch, settings.sequence_group)
    batch = _pad(rows)
    if settings.strip_padding:
        return batch
    mask = attention_mask.long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return replace(batch, attention_mask=mask, position_ids=positions)


def _pack(
    rows: Sequence[RowTokens],
    shared: Sequence[int],
    *,
    multiple_of: int,
    tells_boundaries: bool,
) -> ForwardBatch:
    """Puts the rows' segments one behind the other: input_ids (1, total).

    What makes the total a multiple is a segment of its own.
    """
    packed_rows = [PackedRow(number, n) for number, n in enumerate(shared)]
    segments = cut_segments(packed_rows, [len(row.ids) for row in rows])
    ids = []
    positions = []
    for row, start, length in segments.parts:
        ids.append(rows[row].ids[start : start + length])
        positions.append(torch.arange(start, start + length))
    given = []
    for row, start, length in segments.parts:
        experts = rows[row].experts
        if experts is not None:
            given.append(experts[start : start + length])
    lengths = [segment.length for segment in segments.parts]
    keys = [torch.from_numpy(places) for places in segments.keys]
    total = sum(lengths)
    missing = -total % multiple_of
    if missing:
        ids.append(torch.zeros(missing, dtype=torch.long))
        positions.append(torch.arange(missing))
        lengths.append(missing)
        keys.append(torch.arange(total, total + missing))
        if given:
            shape = (missing, *given[0].shape[1:])
            given.append(given[0].new_full(shape, missing_choice(given[0].dtype)))
    sampled = _sampled_tokens(rows, [torch.from_numpy(places) for places in segments.places])
    return ForwardBatch(
        input_ids=torch.cat(ids)[None],
        position_ids=torch.cat(positions)[None],
        logit_positions=sampled.logit_positions,
        labels=sampled.labels,
        rows=sampled.rows,
        columns=sampled.columns,
        sequences=Sequences.of(
            lengths, keys if any(shared) else None, tells_boundaries=tells_boundaries
        ),
        router_pass=RouterPass(given=torch.cat(given)) if given else None,
    )


def _pad(rows: Sequence[RowTokens]) -> ForwardBatch:
    """Puts rows one below the other, padded on the right: input_ids (rows, longest)."""
    ids = pad_sequence([row.ids for row in rows], batch_first=True)
    places = torch.arange(ids.numel()).view_as(ids)
    sampled = _sampled_tokens(rows, list(places))
    return ForwardBatch(
        input_ids=ids,
        # Padding continues the positions: numbers that start again would be read as packed
        # sequences.
        position_ids=places[:1].repeat(len(rows), 1),
        logit_positions=sampled.logit_positions,
        labels=sampled.labels,
        rows=sampled.rows,
        columns=sampled.columns,
        router_pass=_padded_choices(rows),
    )


def _padded_choices(rows: Sequence[RowTokens]) -> RouterPass | None:
    """Pads the engine's choices as `_pad` does the tokens; None where the batch has none."""
    given = [row.experts for row in rows if row.experts is not None]
    if not given:
        return None
    filler = missing_choice(given[0].dtype)
    padded = pad_sequence(given, batch_first=True, padding_value=filler)
    return RouterPass(given=padded.flatten(0, 1))


@dataclass
class _SampledTokens:
    """Holds `ForwardBatch`'s fields of the N sampled tokens."""

    logit_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor


def _sampled_tokens(rows: Sequence[RowTokens], places: Sequence[Tensor]) -> _SampledTokens:
    """Gathers the sampled tokens of rows, whose tokens lie at `places` (a row's tokens,)."""
    logit_positions = []
    numbers = []
    for number, (row, row_places) in enumerate(zip(rows, places, strict=True)):
        logit_positions.append(row_places[row.sampled - 1])
        numbers.append(torch.full((len(row.sampled),), number))
    return _SampledTokens(
        logit_positions=torch.cat(logit_positions),
        labels=torch.cat([row.ids[row.sampled] for row in rows]),
        rows=torch.cat(numbers),
        columns=torch.cat([row.columns for row in rows]),
    )


def _take_rank_part(whole: ForwardBatch, group: dist.ProcessGroup) -> ForwardBatch:
    """Takes this rank's part of packed rows.

    The sequences stay whole, as attention sees all positions.
    """
    assert whole.sequences is not None
    width = whole.input_ids.shape[1] // group.size()
    start = group.rank() * width
    stop = start + width
    here = (whole.logit_positions >= start) & (whole.logit_positions < stop)  # (N,)
    router_pass = whole.router_pass
    if router_pass is not None and router_pass.given is not None:
        router_pass = RouterPass(given=router_pass.given[start:stop])
    return replace(
        whole,
        input_ids=whole.input_ids[:, start:stop],
        position_ids=whole.position_ids[:, start:stop],
        logit_positions=whole.logit_positions[here] - start,
        labels=whole.labels[here],
        rows=whole.rows[here],
        columns=whole.columns[here],
        router_pass=router_pass,
        sequences=replace(whole.sequences, group=group),
    )
