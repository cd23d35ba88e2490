"""The ranks of a worker group: their process groups, sums over them, a model's shards, and offloading to CPU memory.

A group of one rank needs no process group: sums are then what they were, and models are not wrapped (FSDP2 on one rank
costs a sixth). Invariant: every rank takes part in every collective in the same order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from training.config import FSDPConfig


def world_size() -> int:
    """Returns the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns this process's number among the ranks."""
    return int(os.environ.get("RANK", "0"))


def start_process_group(device: torch.device) -> None:
    """Joins the ranks that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; does nothing for a single one.

    CPU tensors always have gloo, so that counts and checkpoints need no GPU.
    """
    if world_size() > 1 and not dist.is_initialized():
        dist.init_process_group(backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def sum_over_ranks(values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Returns the elementwise sum of every rank's CPU tensor; on a single rank the tensor itself."""
    if world_size() > 1:
        values = values.clone()
        dist.all_reduce(values, op=op)
    return values


def max_over_ranks(values: Tensor) -> Tensor:
    """Returns the elementwise maximum instead."""
    return sum_over_ranks(values, dist.ReduceOp.MAX)


@cache
def rank_group(ranks: int) -> dist.ProcessGroup | None:
    """Makes, at the first call, this rank's group of `ranks` consecutive ranks: sequence- or tensor-parallel.

    None for a single rank.
    """
    return None if ranks == 1 else dist.new_subgroups(group_size=ranks)[0]


def is_leader(group: dist.ProcessGroup | None) -> bool:
    """Says whether this rank is the first of its tensor-parallel group; None is a group of one."""
    return group is None or dist.get_rank(group) == 0


def from_leader(value: Any, group: dist.ProcessGroup | None) -> Any:
    """Returns the leader's value on every rank of a tensor-parallel group; what the others give is not read."""
    if group is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


class SumOfParts(torch.autograd.Function):
    """Sums a group's tensors: all its ranks compute the same loss from it, so each part's gradient is the sum's."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns the sum of the group's parts."""
        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Hands the sum's gradient on to this rank's part."""
        return gradient, None


def shard_model(module: nn.Module, config: FSDPConfig, compute_dtype: torch.dtype, device: torch.device) -> None:
    """Shards a model over all ranks in place by FSDP2, layer by layer, then the rest; does nothing on a single rank.

    Parameters stay float32 shards, of the weights that the first rank holds; the others' may be on the meta device.
    They are gathered in `compute_dtype`, and gradients are averaged in float32.
    """
    if world_size() == 1:
        return
    weights = dict(module.state_dict()) if rank() == 0 else {}
    mesh = init_device_mesh(device.type, (world_size(),), mesh_dim_names=("dp",))
    dtype = None if compute_dtype == torch.float32 else compute_dtype
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in [*decoder_layers(module), module]:
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=config.reshard_after_forward)
    if rank() > 0:
        module.to_empty(device=device)
    set_model_state_dict(module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    # Those too that no checkpoint holds, such as rotary frequencies.
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks that transformers says must stay whole."""
    names = {name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in module.modules() if type(m).__name__ in names]


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor (a collective: every rank must ask for it), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def on_device(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, config: FSDPConfig
) -> Iterator[None]:
    """Brings offloaded parameters and optimiser state to the device for the block, and back to CPU memory after it.

    `module` is what `shard_model` was given: inside it, FSDP2 would not notice that its outermost parameters have
    moved, and go on with the old ones. Optimiser state that is not offloaded is brought as well: loading a checkpoint
    puts it beside offloaded parameters.
    """
    if config.param_offload:
        assert world_size() == 1 or isinstance(module, FSDPModule), "only the sharded root knows all its parameters"
        module.to(device)
    _move_state(optimizer, device)
    try:
        yield
    finally:
        offload(module, optimizer, config)


def offload(module: nn.Module, optimizer: torch.optim.Optimizer | None, config: FSDPConfig) -> None:
    """Sends to CPU memory what the config keeps there between calls."""
    cpu = torch.device("cpu")
    if config.param_offload:
        module.to(cpu)
    if config.optimizer_offload:
        _move_state(optimizer, cpu)


def _move_state(optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Moves all of it, `step` too: the fused AdamW wants it beside the parameters."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device, non_blocking=True)
    # Until the copies are done, the CPU's memory may hold anything.
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()
