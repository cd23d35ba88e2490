"""The channel that carries weights from the policy to engines with ranks of their own."""

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# How long a transfer waits for the other side.
CHANNEL_TIMEOUT = timedelta(minutes=30)


class WeightChannel:
    """Carries weights from the policy's first rank, which is number 0, to the ranks of engines.

    The engines' ranks have a world of their own, so that the channel is a process group beside it.

    Args:
        address: of the store at which both sides meet.
        number: of this process in the channel.
        size: how many processes the channel connects.
        device: where the tensors are.
    """

    def __init__(
        self, address: tuple[str, int], number: int, size: int, device: torch.device
    ) -> None:
        store = dist.PrefixStore("weights", dist.TCPStore(*address, wait_for_workers=False))
        if device.type == "cuda":
            self.group = dist.ProcessGroupNCCL(store, number, size, CHANNEL_TIMEOUT)
        else:
            self.group = dist.ProcessGroupGloo(store, number, size, CHANNEL_TIMEOUT)
        self.device = device

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Sends the first rank's tensor, or receives it in place."""
        self.group.broadcast(tensor, 0).wait()
        return tensor

    def receive(
        self, manifest: dict[str, torch.Size], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) in the order of the manifest, as they come."""
        for name, shape in manifest.items():
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            yield name, self.broadcast(buffer)
