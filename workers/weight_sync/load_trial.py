"""A trial of an engine's weight loader: which parameters would a manifest fill, and which not?"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from workers.weight_sync.manifest import Manifest

# How loaders write to a parameter.
WRITES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
)


@dataclass(frozen=True)
class Part:
    """Names the part of a storage that was written to."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Write:
    """Names what one tensor of the manifest would write to one part of a parameter."""

    sender: str
    part: Part


class LoadTrial(TorchDispatchMode):
    """Records which parts of an engine's parameters a manifest would be written to.

    In its block nothing is written.

        trial = LoadTrial(manifest)
        with trial:
            model.load_weights(trial.weights())
        refuse(trial.problems(dict(model.named_parameters())))
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.manifest = manifest
        # The tensor that the loader was handed last.
        self.sending = ""
        # The writes to each storage.
        self.written: dict[int, set[Write]] = defaultdict(set)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the manifest's tensors, without memory."""
        for name, shape in self.manifest.items():
            self.sending = name
            yield name, torch.empty(shape, device="meta")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records a write instead of doing it."""
        if func not in WRITES:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if target.numel() > 0:
            part = Part(target.storage_offset(), tuple(target.shape), target.stride())
            self.written[_storage_of(target)].add(Write(self.sending, part))
        return target

    def problems(self, parameters: dict[str, Tensor]) -> list[str]:
        """Names the parameters that would not be filled once, and the tensors without use."""
        problems = []
        used: set[str] = set()
        for name, parameter in parameters.items():
            writes = self.written[_storage_of(parameter)]
            senders = sorted({write.sender for write in writes})
            used.update(senders)
            parts = {write.part for write in writes}
            count = sum(math.prod(write.part.shape) for write in writes)
            if len(parts) < len(writes):
                problems.append(f"written twice: {name}, by {', '.join(senders)}")
            elif count != parameter.numel():
                problems.append(
                    f"missing: {name} gets {count:,} of its {parameter.numel():,} elements, "
                    f"from {', '.join(senders) or 'no tensor'}"
                )
        for name in self.manifest.keys() - used:
            problems.append(f"unused: {name} {tuple(self.manifest[name])}")
        return problems


def _storage_of(tensor: Tensor) -> int:
    """Returns a number that tensors share exactly where they share their memory."""
    return tensor.untyped_storage()._cdata
