"""The mini-batches of an update: which rows each has, and what its means are divided by.

Invariant: over an epoch every row is in exactly one mini-batch, and counts are those of all ranks.
"""

import torch
from torch import Tensor

from data.protocol import DataProto
from data.seeds import seed_for
from training.batch.row_groups import shuffled_groups
from training.config import UpdatePlan
from training.core_algos import GlobalBatchInfo
from workers.ranks.process_groups import sum_over_ranks, world_size


def rows_of_updates(data: DataProto, plan: UpdatePlan) -> list[Tensor]:
    """Lists the row numbers of every mini-batch, epoch by epoch; shuffling keeps groups together.

    meta_info `seed` and `global_steps` seed the shuffling.

    Raises:
        ValueError: the rows do not divide into the plan's mini-batches.
    """
    if len(data) % plan.mini_batches:
        raise ValueError(
            f"{len(data)} rows do not divide into {plan.mini_batches} mini-batches; arrange the "
            "batch by its plan (training/batch/batching.py), or choose a ppo_mini_batch_size that "
            "divides its rows"
        )
    size = len(data) // plan.mini_batches
    if not plan.shuffle:
        return list(torch.arange(len(data)).split(size)) * plan.epochs
    seed = seed_for(data.meta_info["seed"], data.meta_info["global_steps"], 0)
    generator = torch.Generator().manual_seed(seed)
    uids = data.non_tensor_batch["uid"].tolist()
    mini_batches: list[Tensor] = []
    for _ in range(plan.epochs):
        mini_batches += shuffled_groups(uids, generator).split(size)
    return mini_batches


def global_counts(
    response_mask: Tensor, sequence_ranks: int = 1, shares: Tensor | None = None
) -> GlobalBatchInfo:
    """Counts a mini-batch's tokens and sequences over all ranks: `agg_loss`'s denominators.

    Args:
        response_mask: (rows, response_len).
        sequence_ranks: each row is on so many ranks, and counts once.
        shares: (rows,) of its episode that a row counts as; None: a row with any token is a
            sequence.
    """
    lengths = response_mask.sum(dim=1)
    sequences = (lengths > 0).double()
    if shares is not None:
        sequences = sequences * shares
    counts = torch.stack([lengths.sum().double(), sequences.sum()])
    tokens, rows = sum_over_ranks(counts).tolist()
    return GlobalBatchInfo(
        dp_size=world_size(),
        batch_num_tokens=round(tokens / sequence_ranks),
        global_batch_size=rows / sequence_ranks,
        loss_scale_factor=None,
    )
