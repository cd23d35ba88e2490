"""The process groups of the ranks: where ranks meet, and what they compute together.

A group of one rank needs no process group, and its sums are then what they were. Invariant: every
rank takes part in every collective, in the same order.
"""

import os
import socket
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Returns the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns this process's number among the ranks."""
    return int(os.environ.get("RANK", "0"))


def open_store(host: str) -> tuple[dist.TCPStore, int]:
    """Opens a store at which ranks meet; returns it and its port.

    It listens on this address alone; torch's own would listen on all.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # The store owns the socket from here on.
    file_descriptor = listener.detach()
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=file_descriptor,
    )
    return store, port


def start_process_group(device: torch.device) -> None:
    """Joins the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe.

    Does nothing for a single rank. CPU tensors always have gloo, so that counts and checkpoints
    need no GPU.
    """
    if world_size() == 1 or dist.is_initialized():
        return
    if device.type == "cuda":
        dist.init_process_group(backend="cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group(backend="gloo")


def sum_over_ranks(values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Returns the elementwise sum of every rank's CPU tensor; on a single rank the tensor itself.

    Args:
        op: another reduction in place of the sum.
    """
    if world_size() == 1:
        return values
    reduced = values.clone()
    dist.all_reduce(reduced, op=op)
    return reduced


def max_over_ranks(values: Tensor) -> Tensor:
    """Returns the elementwise maximum of every rank's CPU tensor."""
    return sum_over_ranks(values, dist.ReduceOp.MAX)


@cache
def rank_group(ranks: int) -> dist.ProcessGroup | None:
    """Returns this rank's group of `ranks` consecutive ranks: sequence- or tensor-parallel.

    Makes it at the first call. Returns None for a single rank.
    """
    if ranks == 1:
        return None
    this_ranks_group, _all_groups = dist.new_subgroups(group_size=ranks)
    return this_ranks_group


def is_leader(group: dist.ProcessGroup | None) -> bool:
    """Checks whether this rank is the first of its tensor-parallel group (None: a group of one)."""
    return group is None or dist.get_rank(group) == 0


def from_leader(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns the leader's value on every rank of a tensor-parallel group.

    What the other ranks pass as `value` is not read.
    """
    if group is None:
        return value
    leader = dist.get_global_rank(group, 0)
    received = [value]
    dist.broadcast_object_list(received, src=leader, group=group)
    return received[0]


def sum_of_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a group's tensors, of which no two have a number in the same place.

    All ranks of the group compute the same loss from the sum, so that the gradient of each part is
    that of the sum.
    """
    whole = part.detach().clone()
    dist.all_reduce(whole, group=group)
    return part + (whole - part.detach())
