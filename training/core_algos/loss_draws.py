"""What a policy loss draws at random, and the generator that it draws from.

Invariant: what is drawn inside an update follows from the seed of its context alone, not from
torch's own generator, which anything else in the process may move.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_GENERATOR: ContextVar[torch.Generator | None] = ContextVar("loss_generator", default=None)


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Makes what losses draw inside the context follow from the seed."""
    before = _GENERATOR.set(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _GENERATOR.reset(before)


def draw_order(count: int, device: torch.device) -> Tensor:
    """Draws an order of `count` things: (count,) int64, the same on every kind of device.

    Outside an update it is drawn from torch's own generator.
    """
    return torch.randperm(count, generator=_GENERATOR.get()).to(device)
