"""Offloading: parameters and optimiser state wait in CPU memory between the calls that need them.

Invariant: inside `on_device` all of a model and its optimiser's state is on the device; after it,
in CPU memory lies what the config keeps there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from training.config import FSDPConfig
from workers.ranks.process_groups import world_size


@contextmanager
def on_device(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    config: FSDPConfig,
) -> Iterator[None]:
    """Brings offloaded parameters and optimiser state to the device for the block.

    After it they go back. `module` is what `shard_model` was given: inside it, FSDP2 would not
    notice that its outermost parameters have moved, and go on with the old ones. Optimiser state
    that is not offloaded is brought as well: loading a checkpoint puts it beside offloaded
    parameters.
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
    """Moves an optimiser's whole state, `step` too: fused AdamW wants it beside the parameters."""
    if optimizer is not None:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device, non_blocking=True)
    # Until the copies are done, the CPU's memory may hold anything.
    if device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()
