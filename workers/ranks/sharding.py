"""The shards of a model: FSDP2 spreads its parameters over all ranks.

A single rank keeps its model as it is: FSDP2 on one rank costs a sixth of the speed.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from training.config import FSDPConfig
from workers.ranks.process_groups import rank, world_size


def shard_model(
    module: nn.Module, config: FSDPConfig, compute_dtype: torch.dtype, device: torch.device
) -> None:
    """Shards a model over all ranks in place by FSDP2, layer by layer, then the rest.

    Does nothing on a single rank. Parameters stay float32 shards, of the weights that the first
    rank holds; the others' may be on the meta device. They are gathered in `compute_dtype`, and
    gradients are averaged in float32.
    """
    if world_size() == 1:
        return
    weights = {}
    if rank() == 0:
        weights = dict(module.state_dict())
    mesh = init_device_mesh(device.type, (world_size(),), mesh_dim_names=("dp",))
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
    )
    for part in [*_blocks(module), module]:
        fully_shard(
            part,
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=config.reshard_after_forward,
        )
    if rank() > 0:
        module.to_empty(device=device)
    from_first_rank = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, weights, options=from_first_rank)
    # Those too that no checkpoint holds, such as rotary frequencies.
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Lists the blocks, such as decoder layers, that transformers wants to stay whole."""
    names: set[str] = set()
    for submodule in module.modules():
        # A plain module has no such attribute, and a model may have None.
        names.update(getattr(submodule, "_no_split_modules", None) or ())
    return [submodule for submodule in module.modules() if type(submodule).__name__ in names]


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns the whole of a sharded tensor, or the tensor itself where it is not sharded.

    A collective: every rank must ask for it.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
