"""Whether an optimiser makes the same step of parameters that several ranks share as of whole ones.

A shared parameter is a DTensor, each rank holding some of its rows. What an optimiser reads of one
as a number (`grad.norm().item()`, `float(grad.abs().max())`) is the number of this rank's rows,
without an error. So two small parameters are stepped twice, whole and shared, and compared.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from workers.ranks.sharding import full_tensor

LEARNING_RATE = 0.1
STEPS = 2
# An optimiser that rounds to bfloat16 may differ by as much of its largest step.
TOLERANCE = 0.2

OptimizerMaker = Callable[[list[Parameter]], Optimizer]


def try_sharded_step(
    make: OptimizerMaker, parameters: Iterable[Tensor], name: str, instead: str
) -> None:
    """Steps small parameters, whole and shared as `parameters` are; does nothing on one rank.

    A collective: every rank must ask for it, and every rank finds the same. An optimiser that draws
    random numbers is not compared.

    Args:
        make: makes the optimiser of some parameters.
        name, instead: how messages name the optimiser, and which others they advise.
    Raises:
        ValueError: the optimiser takes no shared parameters, or steps them otherwise than whole.
    """
    mesh = _mesh_of(parameters)
    if mesh is None:
        return
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    with torch.random.fork_rng(devices):
        whole = _stepped(make, mesh, shares=False)
        again = _stepped(make, mesh, shares=False)
        try:
            shared = _stepped(make, mesh, shares=True)
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"optim.optimizer={name} takes no parameters that several ranks share "
                f"({type(error).__name__}: {reason}): train on one rank, or take {instead}"
            ) from error
    if not all(map(torch.equal, whole, again)):
        return
    largest = max(float(tensor.abs().max()) for tensor in whole)
    pairs = zip(whole, shared, strict=True)
    differs = max(float((one - other).abs().max()) for one, other in pairs)
    # Written so that a number that is none counts as different.
    if not differs <= TOLERANCE * largest:
        raise ValueError(
            f"optim.optimizer={name}: on {mesh.size()} ranks its step differs from one rank's by "
            f"{differs / largest:.2g} of its largest change. Does it read a number of a gradient, "
            "as by `.item()` or `float()`? That is the number of one rank's rows: write "
            "`.full_tensor().item()` where the gradient is a DTensor; or train on one rank, or "
            f"take {instead}"
        )


def _mesh_of(parameters: Iterable[Tensor]) -> DeviceMesh | None:
    """Returns the ranks that share the parameters; None where one rank holds them whole."""
    for parameter in parameters:
        if isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1:
            return parameter.device_mesh
    return None


def _stepped(make: OptimizerMaker, mesh: DeviceMesh, *, shares: bool) -> list[Tensor]:
    """Returns by how much each of two small parameters changed over a few steps, whole.

    They are a matrix and a vector of four rows a rank. Gradients grow from row to row, so that
    norms, means and largest values of one rank's rows are not those of all.
    """
    rows = 4 * mesh.size()
    generator = torch.Generator().manual_seed(0)
    begins = [torch.randn(shape, generator=generator) for shape in ((rows, 3), (rows,))]
    parameters = [Parameter(_placed(begin, mesh, shares=shares)) for begin in begins]
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    for _ in range(STEPS):
        for parameter, begin in zip(parameters, begins, strict=True):
            growth = torch.logspace(-2, 1, rows).reshape(-1, *[1] * (begin.dim() - 1))
            gradient = torch.randn(begin.shape, generator=generator) * growth
            parameter.grad = _placed(gradient, mesh, shares=shares)
        optimizer.step()
    changed = zip(parameters, begins, strict=True)
    return [full_tensor(now.detach()).cpu() - begin for now, begin in changed]


def _placed(tensor: Tensor, mesh: DeviceMesh, *, shares: bool) -> Tensor:
    """Returns a copy of a tensor on the ranks' device, whole or in shares of its rows."""
    if shares:
        return distribute_tensor(tensor.clone(), mesh, [Shard(0)] * mesh.ndim)
    return tensor.clone().to(mesh.device_type)
