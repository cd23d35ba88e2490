"""The micro-batches of a batch: cut within limits, laid out, and their results put together.

Invariant: every row of the batch is in exactly one micro-batch, and all ranks have the same number
of micro-batches, since each runs collectives.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data.protocol import DataProto
from data.watchdog import beat
from training.batch.micro_batches import plan_padded
from training.config import MicroBatching
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_fields import CANDIDATES, PREDICTED
from workers.model.packing import ForwardBatch, RowTokens, build_forward_batch, row_tokens
from workers.model.sequences import to_device
from workers.model.shared_prefix import MicroBatch, PackedRow, order_rows, plan_packed
from workers.ranks.process_groups import max_over_ranks, sum_of_parts

# What the stall watchdog is told behind every micro-batch.
PROGRESS = "a micro-batch was read or learnt from"


def plan_batch(
    rows: Sequence[RowTokens], settings: ForwardSettings, limits: MicroBatching
) -> list[MicroBatch]:
    """Plans micro-batches over the rows."""
    lengths = [len(row.ids) for row in rows]
    if settings.pack_rows:
        order = order_rows([row.ids.numpy() for row in rows], settings.key_cost)
        return plan_packed(order, lengths, limits)
    plan = []
    for row_numbers in plan_padded(lengths, limits):
        plan.append([PackedRow(row, 0) for row in row_numbers])
    return plan


def iter_micro_batches(
    data: DataProto, settings: ForwardSettings, limits: MicroBatching
) -> Iterator[tuple[Tensor, DataProto, ForwardBatch]]:
    """Yields (rows, data[rows], their layout on the device) for each micro-batch.

    Log-probs are taken at meta_info `temperature`, or 1. Of several ranks one that has fewer
    micro-batches repeats its last one's first row with nothing sampled in it; `rows` is then empty.
    """
    tokens = row_tokens(data, settings.strip_padding)
    plan = plan_batch(tokens, settings, limits)
    missing = int(max_over_ranks(torch.tensor(len(plan)))) - len(plan)
    for planned in plan:
        rows = torch.tensor([row.row for row in planned])
        micro = data.select_idxs(rows)
        yield rows, micro, _lay_out([tokens[row.row] for row in planned], planned, micro, settings)
        beat(PROGRESS)
    for _ in range(missing):
        first = plan[-1][0]
        rows = torch.tensor([first.row])
        micro = data.select_idxs(rows)
        for name in ("response_mask", *micro.meta_info.get(PREDICTED, ())):
            micro.batch[name] = torch.zeros_like(micro.batch[name])
        nothing_sampled = tokens[first.row].without_sampled()
        yield rows[:0], micro, _lay_out([nothing_sampled], [first], micro, settings)
        beat(PROGRESS)


def _lay_out(
    rows: Sequence[RowTokens], planned: MicroBatch, micro: DataProto, settings: ForwardSettings
) -> ForwardBatch:
    """Lays the rows of one micro-batch out on the device."""
    shared = [row.shared for row in planned]
    batch = build_forward_batch(rows, shared, settings, micro.batch["attention_mask"])
    batch.temperature = micro.meta_info.get("temperature", 1.0)
    names = micro.meta_info.get(CANDIDATES, ())
    if names:
        ids = torch.cat([micro.batch[name] for name in names], dim=-1)  # (rows, response_len, K)
        batch.candidates = ids[batch.rows, batch.columns].long()
    return to_device(batch, settings.device)


def scatter_tokens(values: Tensor, inputs: ForwardBatch, shape: Sequence[int]) -> Tensor:
    """Scatters values (N,) to their places among zeros (rows, response_len); differentiable.

    Values (N, K) give (rows, response_len, K). The ranks of a sequence-parallel group all get the
    whole, and must all compute the same loss from it.
    """
    zeros = values.new_zeros((*shape, *values.shape[1:]))
    scattered = zeros.index_put((inputs.rows, inputs.columns), values)
    if inputs.sequences is None or inputs.sequences.group is None:
        return scattered
    return sum_of_parts(scattered, inputs.sequences.group)


def read_rows(rows: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Puts micro-batches' values in the order of the rows, on the CPU: only here the host waits.

    Args:
        rows: of each micro-batch, the numbers of its rows.
        values: of each micro-batch (rows, response_len); any rows more were repeated, and are left
            out.
    Returns: (B, response_len).
    """
    kept = []
    for row_numbers, row_values in zip(rows, values, strict=True):
        kept.append(row_values[: len(row_numbers)])
    unordered = torch.cat(kept)
    ordered = unordered.new_empty(unordered.shape, device="cpu")
    ordered[torch.cat(list(rows))] = unordered.cpu()
    return ordered
