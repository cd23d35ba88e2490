"""Which tensors of a model move: a few of their numbers before and after, compared exactly.

A tensor that an update leaves as it was, or that only its weight decay has touched, is not trained,
whatever its gradient's norm says. Invariant: a model is read and never written, and every rank
comes to the same answer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workers.ranks.process_groups import max_over_ranks

# Numbers of a tensor that are compared; of one with more rows, as an embedding, one a row.
SAMPLED = 4096
# Rounding steps of its type that a number must be able to move by, to be expected to.
VISIBLE_STEPS = 16
# Parts that a batch need not reach: experts that nothing is sent to, and towers without an image.
MAY_REST = ("expert", "visual", "vision")
# Tensors that are named.
MOST_NAMED = 3

Numbers = dict[str, Tensor]


def sample_numbers(tensors: Mapping[str, Tensor]) -> Numbers:
    """Copies some numbers of each tensor, of this rank's part of it: (at most about SAMPLED,)."""
    return {name: _sampled(tensor.detach()) for name, tensor in tensors.items()}


def _sampled(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    wanted = SAMPLED
    if tensor.dim() == 2:
        wanted = max(wanted, tensor.shape[0])
    stride = max(tensor.numel() // wanted, 1)
    return tensor.reshape(-1)[::stride].clone()


def trained_tensors(module: nn.Module) -> list[str]:
    """Names the parameters that are to train, but for those that a batch may leave alone."""
    names = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not any(part in name for part in MAY_REST):
            names.append(name)
    return names


def moved_tensors(tensors: Mapping[str, Tensor], before: Numbers) -> list[str]:
    """Names the tensors of which a sampled number is no longer what it was; a collective."""
    now = sample_numbers({name: tensors[name] for name in before})
    flags = [(now[name] != numbers).any() for name, numbers in before.items()]
    return _named(list(before), flags)


def still_tensors(
    tensors: Mapping[str, Tensor], before: Numbers, *, rate: float, decay: float, updates: int
) -> list[str]:
    """Names the tensors that updates left as they were, or only decayed; a collective.

    Those are left out whose numbers the rate could not move, as their type rounds it away.

    Args:
        rate: the learning rate; decay: of weights, in one update rate x decay.
        updates: optimiser steps that were made.
    """
    now = sample_numbers({name: tensors[name] for name in before})
    kept = (1 - rate * decay) ** updates
    is_moved = []
    is_movable = []
    for name, numbers in before.items():
        step = torch.finfo(numbers.dtype).eps * numbers.abs().float()
        is_movable.append((step * VISIBLE_STEPS < rate).any())
        decayed = (now[name].float() - numbers.float() * kept).abs() <= step * (updates + 1)
        is_moved.append(~(decayed.all() | (now[name] == numbers).all()))
    moved = set(_named(list(before), is_moved))
    return [name for name in _named(list(before), is_movable) if name not in moved]


def _named(names: list[str], flags: list[Tensor]) -> list[str]:
    """Picks the names whose flag, 0-dim bool, is set on any rank."""
    if not flags:
        return []
    anywhere = max_over_ranks(torch.stack(flags).float().cpu()).tolist()
    return [name for name, flag in zip(names, anywhere, strict=True) if flag]


@contextmanager
def watched_update(
    module: nn.Module, names: list[str], optimizer: Optimizer, prefix: str
) -> Iterator[Callable[[], dict[str, float]]]:
    """Yields what tells, behind the update in the block, which of the named tensors stood still.

    It returns PREFIX/still_tensors, their number, PREFIX/still/NAME for the first of them, and
    PREFIX/optimizer_steps.
    """
    parameters = dict(module.named_parameters())
    parameters = {name: parameters[name] for name in names if name in parameters}
    before = sample_numbers(parameters)
    updates = 0

    def count(*_: object) -> None:
        nonlocal updates
        updates += 1

    def compare() -> dict[str, float]:
        group = optimizer.param_groups[0]
        rate = float(group["lr"])
        decay = float(group.get("weight_decay", 0.0))
        still = still_tensors(parameters, before, rate=rate, decay=decay, updates=updates)
        metrics = {
            f"{prefix}/still_tensors": float(len(still)),
            f"{prefix}/optimizer_steps": float(updates),
        }
        metrics.update({f"{prefix}/still/{name}": 1.0 for name in still[:MOST_NAMED]})
        return metrics

    hook = optimizer.register_step_post_hook(count)
    try:
        yield compare
    finally:
        hook.remove()
