"""An average of the weights that train, over the steps so far: a teacher that moves slowly.

    average  <-  decay * average + (1 - decay) * weights      behind each step's update

as in mean teachers (arXiv:1703.01780); SDPO's self-teacher is one (arXiv:2601.20802). With LoRA it
is the adapters' average, and the base is shared. Invariant: its tensors are sharded as the weights
are, and are theirs, in place, only inside of `in_place`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class WeightAverage:
    """Averages the weights of a module that train.

    Args:
        module: whose weights are trained, in float32.
        decay: part of the average that stays.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = module
        self.decay = decay
        self.averages: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Begins with the weights as they are."""
        self.averages = {name: weight.detach().clone() for name, weight in self._weights()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes in the weights of a step."""
        for name, weight in self._weights():
            average = _local(self.averages[name])
            average.lerp_(_local(weight).to(average.device), 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the average in the place of the weights for the block, and the weights back."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchanges weights and average, one tensor at a time."""
        for name, weight in self._weights():
            local = _local(weight)
            average = _local(self.averages[name])
            before = local.clone()
            local.copy_(average)
            average.copy_(before)

    def _weights(self) -> list[tuple[str, Tensor]]:
        """Lists the weights that train, by name."""
        named = self.module.named_parameters()
        return [(name, weight.detach()) for name, weight in named if weight.requires_grad]


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard, whose memory is the tensor's."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
