"""The exchange around attention in a sequence-parallel group (Ulysses, arXiv:2309.14509).

    rank 0     P0 P1 A0, all heads   ->   all positions, half of the heads   (and back behind it)
    rank 1     B0 B1 0,  all heads   ->   all positions, the other half

Invariant: outside of attention a rank holds its part of the positions, with all heads.
"""

from math import lcm

import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges all heads of this rank's positions for this rank's heads of all positions.

    Key heads are repeated until the ranks divide them.
    """
    # Divides the query's heads, as both do.
    heads = lcm(key.shape[1], group.size())
    key = key.repeat_interleave(heads // key.shape[1], dim=1)
    value = value.repeat_interleave(heads // value.shape[1], dim=1)
    return (
        exchange(query, group, split=1, join=2),
        exchange(key, group, split=1, join=2),
        exchange(value, group, split=1, join=2),
    )


def to_positions(output: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchanges this rank's heads of all positions for all heads of this rank's positions."""
    return exchange(output, group, split=2, join=1)


def exchange(x: Tensor, group: dist.ProcessGroup, split: int, join: int) -> Tensor:
    """Cuts dimension `split` into a part for each rank, and joins what the ranks send along `join`.

    Backward is the reverse.
    """
    parts = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()  # (ranks, ...)
    received = all_to_all_single_autograd(parts, None, None, group)
    return received.movedim(0, join).flatten(join, join + 1)
