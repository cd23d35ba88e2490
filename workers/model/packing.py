"""How rows are laid out for the forward pass: packed without padding, or as groups that share their prompt.

Rows of one prompt form a shared-prefix group: the prompt once, then every response as a branch that sees the prompt and
itself (plan: training/batch/batching.py). A row alone is a group with one branch, so there is one path for all.

    rows       P0 P1 A0 A1 | P0 P1 B0        group  P0 P1 A0 A1 B0
    segments                                         0  0  1  1  2        position_ids  0 1 2 3 2

A micro-batch of groups is padded and has a mask; one of single rows is packed, where the model allows it, one row
behind the other without padding (workers/model/attention.py). A token's log-prob comes from the hidden state before it,
at its logit position: the last prompt token's state predicts both A0 and B0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from data.protocol import DataProto
from training.batch.batching import MicroBatch, PrefixGroup, plan_micro_batches, roundup_divisible
from training.config import MicroBatching
from workers.model.attention import Sequences
from workers.ranks.distributed import SumOfParts, max_over_ranks

# What a forward pass reads of a batch.
FORWARD_FIELDS = ("prompts", "responses", "response_mask", "attention_mask")
# The mask of a shared-prefix group is dense: its cost grows with the square.
MAX_GROUP_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """Says how a module is run: compute type, device, and how rows are laid out."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    strip_padding: bool = True
    share_prompts: bool = True
    # Single rows lie one behind the other: for models that `use_own_attention`.
    pack_rows: bool = False
    # The sequence-parallel group of this rank: ranks that share each sequence, with the same rows.
    sequence_group: dist.ProcessGroup | None = None

    @property
    def sequence_ranks(self) -> int:
        """Returns the size of the sequence-parallel group."""
        return 1 if self.sequence_group is None else self.sequence_group.size()

    def autocast(self) -> AbstractContextManager[None]:
        """Computes in `dtype` within the block."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)


@dataclass(kw_only=True)
class ForwardBatch:
    """Holds one micro-batch on the device: T groups of at most L tokens, with N sampled tokens.

    Packed rows are one group of L tokens.

    Attributes:
        input_ids, position_ids: (T, L).
        attention_mask: of groups (T, 1, L, L) bool, of padded rows (T, L); None: causal, with padding on the right.
        logit_positions: (N,) in T * L, the state that predicts each sampled token.
        labels: (N,) the sampled token.
        rows, columns: (N,) the row of the batch it belongs to, and its column among the responses.
        sequences: of packed rows, or of a sequence-parallel group.
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    logit_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor
    sequences: Sequences | None = None

    def model_inputs(self) -> dict[str, Any]:
        """Returns the keyword arguments of a transformers model."""
        inputs = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {**inputs, "use_cache": False, **({} if self.sequences is None else {"sequences": self.sequences})}

    def to(self, device: torch.device) -> ForwardBatch:
        """Returns a copy on the device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return ForwardBatch(**{k: v if v is None else v.to(device, non_blocking=True) for k, v in values.items()})


def plan_batch(data: DataProto, settings: ForwardSettings, limits: MicroBatching) -> list[MicroBatch]:
    """Plans micro-batches over the rows of `data` (prompts, responses, attention_mask)."""
    width = data.batch["prompts"].shape[1]
    mask = data.batch["attention_mask"]
    prompt_lengths = mask[:, :width].sum(dim=1).tolist()
    response_lengths = mask[:, width:].sum(dim=1).tolist()
    prompts = data.batch["prompts"].numpy()
    keys = [(n, row.tobytes()) for n, row in zip(prompt_lengths, prompts, strict=True)]
    return plan_micro_batches(
        keys,
        prompt_lengths,
        response_lengths,
        max_token_len=limits.max_token_len,
        micro_batch_size=limits.micro_batch_size,
        share_prompts=settings.share_prompts and settings.strip_padding,
        max_group_tokens=MAX_GROUP_TOKENS,
        pack_rows=settings.pack_rows,
    )


def build_forward_batch(data: DataProto, micro_batch: MicroBatch, settings: ForwardSettings) -> ForwardBatch:
    """Lays the groups of one micro-batch out; `strip_padding` false keeps each row's padding and masks it.

    In a sequence-parallel group each rank gets its part of the positions, with the sampled tokens predicted there.
    """
    prompts, responses = data.batch["prompts"], data.batch["responses"]
    width = prompts.shape[1]
    prompt_mask = data.batch["attention_mask"][:, :width].bool()
    response_valid = data.batch["attention_mask"][:, width:].bool()
    sampled = data.batch["response_mask"].bool() & response_valid
    if not settings.strip_padding:
        prompt_mask, response_valid = torch.ones_like(prompt_mask), torch.ones_like(response_valid)

    laid = [_lay_out(group, prompts, responses, prompt_mask, response_valid, sampled) for group in micro_batch]
    packed = settings.pack_rows and all(len(group) == 1 for group in micro_batch)
    batch = (_packed if packed else _padded)(laid, settings.sequence_ranks)
    if not settings.strip_padding:
        mask = torch.stack([data.batch["attention_mask"][group[0]] for group in micro_batch])  # (T, P + R)
        return replace(batch, attention_mask=mask, position_ids=(mask.cumsum(dim=1) - 1).clamp(min=0))
    return batch if settings.sequence_group is None else _sequence_shard(batch, settings.sequence_group)


def _packed(laid: list[_GroupLayout], multiple_of: int) -> ForwardBatch:
    """Packs single rows, one behind the other: input_ids (1, total).

    What makes the total a multiple is a sequence of its own.
    """
    lengths = [len(t.ids) for t in laid]
    missing = -sum(lengths) % multiple_of
    return ForwardBatch(
        input_ids=torch.cat([*(t.ids for t in laid), torch.zeros(missing, dtype=torch.long)])[None],
        position_ids=torch.cat([*(t.positions for t in laid), torch.arange(missing)])[None],
        attention_mask=None,
        **_sampled_tokens(laid, accumulate(lengths, initial=0)),
        sequences=Sequences.of([*lengths, missing] if missing else lengths),
    )


def _padded(laid: list[_GroupLayout], multiple_of: int) -> ForwardBatch:
    """Puts groups one below the other, padded on the right; with the mask of branches, where any has two."""
    length = roundup_divisible(max(len(t.ids) for t in laid), multiple_of)
    ids = torch.zeros(len(laid), length, dtype=torch.long)
    segments = torch.full((len(laid), length), -1, dtype=torch.long)
    # Padding continues the positions: numbers that start again would be read as packed sequences.
    positions = torch.arange(length).repeat(len(laid), 1)
    for i, group in enumerate(laid):
        own = slice(len(group.ids))
        ids[i, own], segments[i, own], positions[i, own] = group.ids, group.segments, group.positions
    return ForwardBatch(
        input_ids=ids,
        position_ids=positions,
        attention_mask=_prefix_mask(segments) if segments.max() > 1 else None,
        **_sampled_tokens(laid, range(0, len(laid) * length, length)),
    )


def _sampled_tokens(laid: list[_GroupLayout], starts: Iterable[int]) -> dict[str, Tensor]:
    """Makes `ForwardBatch`'s fields of the sampled tokens; `starts` says where each group begins."""
    return {
        "logit_positions": torch.cat([start + t.logit_positions for start, t in zip(starts, laid, strict=False)]),
        "labels": torch.cat([t.labels for t in laid]),
        "rows": torch.cat([t.rows for t in laid]),
        "columns": torch.cat([t.columns for t in laid]),
    }


def _sequence_shard(whole: ForwardBatch, group: dist.ProcessGroup) -> ForwardBatch:
    """Takes this rank's part of every row; mask and sequences stay whole, as the attention sees all positions."""
    width = whole.input_ids.shape[1] // group.size()
    own = slice(group.rank() * width, (group.rank() + 1) * width)
    row, place = whole.logit_positions // whole.input_ids.shape[1], whole.logit_positions % whole.input_ids.shape[1]
    mine = (place >= own.start) & (place < own.stop)
    return replace(
        whole,
        input_ids=whole.input_ids[:, own],
        position_ids=whole.position_ids[:, own],
        logit_positions=(row * width + place - own.start)[mine],
        labels=whole.labels[mine],
        rows=whole.rows[mine],
        columns=whole.columns[mine],
        sequences=replace(whole.sequences or Sequences(), group=group),
    )


@dataclass
class _GroupLayout:
    """Holds one group without padding: fields as in ForwardBatch, and the segment of each token (0: the prompt)."""

    ids: Tensor
    segments: Tensor
    positions: Tensor
    logit_positions: Tensor
    labels: Tensor
    rows: Tensor
    columns: Tensor


def _lay_out(
    group: PrefixGroup, prompts: Tensor, responses: Tensor, prompt_mask: Tensor, response_valid: Tensor, sampled: Tensor
) -> _GroupLayout:
    """Lays a group out: the prompt of its first row, then every row's response as a branch."""
    prompt = prompts[group[0]][prompt_mask[group[0]]]
    start = n_prompt = len(prompt)
    pieces, segments, positions = [prompt], [torch.zeros(n_prompt, dtype=torch.long)], [torch.arange(n_prompt)]
    logit_positions, labels, rows, columns = [], [], [], []
    for branch, row in enumerate(group, start=1):
        valid = response_valid[row].nonzero().squeeze(1)
        pieces.append(responses[row, valid])
        segments.append(torch.full((len(valid),), branch))
        positions.append(torch.arange(n_prompt, n_prompt + len(valid)))
        # Within this branch.
        offsets = sampled[row, valid].nonzero().squeeze(1)
        logit_positions.append(torch.where(offsets == 0, n_prompt - 1, start + offsets - 1))
        labels.append(responses[row, valid[offsets]])
        rows.append(torch.full((len(offsets),), row))
        columns.append(valid[offsets])
        start += len(valid)
    cat = torch.cat
    return _GroupLayout(
        cat(pieces), cat(segments), cat(positions), cat(logit_positions), cat(labels), cat(rows), cat(columns)
    )


def _prefix_mask(segments: Tensor) -> Tensor:
    """Makes the mask (T, 1, L, L): causal, and within the prompt (segment 0) or one's own branch.

    Padding (-1) sees itself, so that no row is empty.
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    key = segments[:, None, :]
    return (causal & ((key == 0) | (key == segments[:, :, None])))[:, None]


def iter_micro_batches(
    data: DataProto, settings: ForwardSettings, limits: MicroBatching
) -> Iterator[tuple[Tensor, DataProto, ForwardBatch]]:
    """Yields (rows, data[rows], their layout on the device); every row of `data` comes exactly once.

    With several ranks all get the same number of micro-batches, since each runs collectives: one that has fewer repeats
    its last one's first row with nothing sampled in it.
    """
    plan = plan_batch(data, settings, limits)
    missing = int(max_over_ranks(torch.tensor(len(plan)))) - len(plan)
    for micro_batch in plan:
        rows = torch.tensor([row for group in micro_batch for row in group])
        micro = data.select_idxs(rows)
        numbers = iter(range(len(rows)))
        local = [[next(numbers) for _ in group] for group in micro_batch]
        yield rows, micro, build_forward_batch(micro, local, settings).to(settings.device)
    for _ in range(missing):
        micro = data.select_idxs(torch.tensor([plan[-1][0][0]]))
        micro.batch["response_mask"] = torch.zeros_like(micro.batch["response_mask"])
        inputs = build_forward_batch(micro, [[0]], settings).to(settings.device)
        yield torch.empty(0, dtype=torch.long), micro, inputs


def scatter_tokens(values: Tensor, inputs: ForwardBatch, shape: Sequence[int]) -> Tensor:
    """Scatters per-token values (N,) to their places among zeros (rows, response_len); differentiable.

    The ranks of a sequence-parallel group all get the whole, and must all compute the same loss from it.
    """
    scattered = values.new_zeros(tuple(shape)).index_put((inputs.rows, inputs.columns), values)
    group = None if inputs.sequences is None else inputs.sequences.group
    return scattered if group is None else SumOfParts.apply(scattered, group)
