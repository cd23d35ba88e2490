"""The ranks of a worker group: their process groups, sums over them, a model's shards, offloading to CPU memory.

Also what a rank's process does once before it builds models, where it keeps to deterministic operations (a run that
asks for it, `trainer.deterministic`, is repeated bitwise on the same machine), and what keeps a CPU run's memory flat.

A group of one rank needs no process group: sums are then what they were, and models are not wrapped (FSDP2 on one rank
costs a sixth). Invariant: every rank takes part in every collective in the same order.
"""

import ctypes
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from training.config import FSDPConfig

# For the other side to come to a weight's transfer.
CHANNEL_TIMEOUT = timedelta(minutes=30)


def open_store(host: str) -> tuple[dist.TCPStore, int]:
    """Opens a store at which ranks meet; returns it and its port.

    It listens on this address alone; torch's own would listen on all.
    """
    listener = socket.create_server((host, 0))
    port, handle = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=handle
    ), port


class WeightChannel:
    """Carries weights from the policy's first rank, number 0, to ranks of engines, which have a world of their own."""

    def __init__(
        self, address: tuple[str, int], number: int, size: int, device: torch.device
    ) -> None:
        store = dist.PrefixStore("weights", dist.TCPStore(*address, wait_for_workers=False))
        kind, self.device = (
            getattr(dist, "ProcessGroupNCCL" if device.type == "cuda" else "ProcessGroupGloo"),
            device,
        )
        self.group = kind(store, number, size, CHANNEL_TIMEOUT)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Sends the first rank's tensor, or receives it in place."""
        self.group.broadcast(tensor, 0).wait()
        return tensor

    def receive(
        self, manifest: dict[str, torch.Size], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) in the order of the manifest, as they come."""
        for name, shape in manifest.items():
            yield name, self.broadcast(torch.empty(shape, dtype=dtype, device=self.device))


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


def sum_of_parts(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums a group's tensors, of which no two have a number in the same place.

    All its ranks compute the same loss from it, so each part's gradient is the sum's.
    """
    whole = part.detach().clone()
    dist.all_reduce(whole, group=group)
    return part + (whole - part.detach())


def shard_model(
    module: nn.Module, config: FSDPConfig, compute_dtype: torch.dtype, device: torch.device
) -> None:
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
    # The blocks that transformers says must stay whole.
    blocks = {
        name for m in module.modules() for name in (getattr(m, "_no_split_modules", None) or ())
    }
    for part in [*(m for m in module.modules() if type(m).__name__ in blocks), module]:
        fully_shard(
            part, mesh=mesh, mp_policy=precision, reshard_after_forward=config.reshard_after_forward
        )
    if rank() > 0:
        module.to_empty(device=device)
    set_model_state_dict(
        module, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    # Those too that no checkpoint holds, such as rotary frequencies.
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor (a collective: every rank must ask for it), or the tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def on_device(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    config: FSDPConfig,
) -> Iterator[None]:
    """Brings offloaded parameters and optimiser state to the device for the block, and back to CPU memory after it.

    `module` is what `shard_model` was given: inside it, FSDP2 would not notice that its outermost parameters have
    moved, and go on with the old ones. Optimiser state that is not offloaded is brought as well: loading a checkpoint
    puts it beside offloaded parameters.
    """
    if config.param_offload:
        assert world_size() == 1 or isinstance(module, FSDPModule), (
            "only the sharded root knows all its parameters"
        )
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


def start_worker(device: torch.device, *, deterministic: bool) -> None:
    """Readies the process: joins the other ranks, and keeps to deterministic operations if asked."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # A single rank saves by itself.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if deterministic:
        # Read at the process's first matrix product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    start_process_group(device)


@contextmanager
def strictly_deterministic(deterministic: bool) -> Iterator[None]:
    """Makes the block of a `deterministic` run deterministic too, or has it raise.

    On CUDA the backward pass of attention takes its deterministic kernels only then (with `warn_only` it warns and
    takes the others), while sampling has operations for which there are none.
    """
    with ExitStack() as stack:
        if deterministic:
            torch.use_deterministic_algorithms(True)
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=True)
        yield


@contextmanager
def expandable_segments(device: torch.device) -> Iterator[None]:
    """Has PyTorch's CUDA memory grow in place in the block, so that batches of ever-changing sizes leave no gaps.

    Not outside, since vLLM's pools, which sleep, cannot have that.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            # PyTorch forgets the settings that are not named again.
            settings = torch._C._accelerator_getAllocatorSettings().split(",")
            others = "".join(
                f"{s}," for s in settings if s and not s.startswith("expandable_segments")
            )
            torch._C._accelerator_setAllocatorSettings(f"{others}expandable_segments:True")
            stack.callback(
                torch._C._accelerator_setAllocatorSettings, f"{others}expandable_segments:False"
            )
        yield


# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def limit_caches() -> None:
    """Bounds oneDNN's caches, unless the environment says otherwise; to be called before the first matrix product.

    Every new shape of a matrix product caches about 300 KB. Batches have new shapes all the time, so by default memory
    grows by 50 MB a step up to 1,024 entries, of which none is used again.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")


def settle_heap() -> None:
    """Has glibc map blocks from 32 MiB on by themselves, so that they go back when freed, and keep the rest at hand.

    Below that size activations are taken from the heap again, step by step: if their freed top went back, every page
    of it would be faulted in anew in each update.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)
        mallopt(M_TRIM_THRESHOLD, 2047 << 20)
