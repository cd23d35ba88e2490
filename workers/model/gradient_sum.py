"""Whether the gradients of a mini-batch's micro-batches are all there when its step is made.

What comes back to one small tensor is added up, micro-batch by micro-batch, and compared with the
gradient that it has in the end. Invariant: the gradient is read and never changed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.model.movement import trained_tensors


@contextmanager
def watched_sum(module: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yields what tells how much of the gradient of the block's backward passes is missing.

    It returns a share of the gradient that there should be, 0-dim: 0 where nothing is missing, and
    where the model is sharded over ranks, whose gradients are reduced on their way.
    """
    parameter = _smallest(module)
    if parameter is None or isinstance(parameter, DTensor):
        yield lambda: torch.zeros(())
        return
    total = _gradient(parameter)

    def add(gradient: Tensor) -> None:
        nonlocal total
        total = total + gradient.detach()

    def missing() -> Tensor:
        distance = (_gradient(parameter) - total).float().norm()
        return distance / total.float().norm().clamp(min=torch.finfo(torch.float32).tiny)

    hook = parameter.register_hook(add)
    try:
        yield missing
    finally:
        hook.remove()


def _smallest(module: nn.Module) -> Tensor | None:
    """Returns the smallest of the parameters that every batch reaches."""
    parameters = dict(module.named_parameters())
    trained = [parameters[name] for name in trained_tensors(module)]
    return min(trained, key=torch.numel, default=None)


def _gradient(parameter: Tensor) -> Tensor:
    """Copies the gradient; zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return parameter.grad.detach().clone()
