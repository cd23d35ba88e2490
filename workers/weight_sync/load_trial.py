"""A trial of an engine's weight loader: which parameters would a manifest fill, and which not?"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
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
    """Names what one tensor of the manifest would write to one part of a parameter.

    Attributes:
        by_loader: the parameter's own loader writes, and not the model's code by itself.
    """

    sender: str
    part: Part
    by_loader: bool


class LoadTrial(TorchDispatchMode):
    """Records which parts of an engine's parameters a manifest would be written to.

    In its block nothing is written.

        trial = LoadTrial(manifest)
        with trial:
            model.load_weights(trial.weights())
        refuse(trial.problems(dict(model.named_parameters()), dict(model.named_buffers())))

    Attributes:
        changed: tensors of the manifest that the loader itself changes.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self.manifest = manifest
        self.changed: set[str] = set()
        # The tensor that the loader was handed last, and where it would be.
        self.sending = ""
        self.sent: Tensor | None = None
        self.is_in_loader = False
        # The writes to each storage.
        self.written: dict[int, set[Write]] = defaultdict(set)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the manifest's tensors, without memory."""
        for name, shape in self.manifest.items():
            self.sending = name
            self.sent = torch.empty(shape, device="meta")
            yield name, self.sent

    def marked(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """Makes a parameter's loader whose writes are known as such."""

        @wraps(loader)
        def load(*args: Any, **kwargs: Any) -> Any:
            outer = self.is_in_loader
            self.is_in_loader = True
            try:
                return loader(*args, **kwargs)
            finally:
                self.is_in_loader = outer

        return load

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records a write instead of doing it."""
        if func._schema.is_mutable and self._is_sent(args[0]):
            self.changed.add(self.sending)
            return args[0]
        if func not in WRITES:
            return func(*args, **(kwargs or {}))
        target = args[0]
        if target.numel() > 0:
            write = Write(self.sending, part_of(target), self.is_in_loader)
            self.written[storage_of(target)].add(write)
        return target

    def _is_sent(self, target: Any) -> bool:
        """Checks whether a tensor is, or is part of, what the loader was handed last."""
        if self.sent is None or not isinstance(target, Tensor):
            return False
        return storage_of(target) == storage_of(self.sent)

    def direct(self, parameters: Mapping[str, Tensor]) -> set[str]:
        """Names the parameters that the model's code writes to by itself."""
        names = set()
        for name, parameter in parameters.items():
            if any(not write.by_loader for write in self.written[storage_of(parameter)]):
                names.add(name)
        return names

    def problems(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        spare: Collection[str] = (),
    ) -> list[str]:
        """Names what would not be filled once, and the tensors without use, but for `spare`.

        Buffers need not be filled: most are the engine's own.
        """
        problems = []
        used: set[str] = set()
        for name, tensor in [*parameters.items(), *buffers.items()]:
            writes = self.written[storage_of(tensor)]
            if not writes and name in buffers:
                continue
            senders = sorted({write.sender for write in writes})
            used.update(senders)
            parts = {write.part for write in writes}
            count = sum(math.prod(write.part.shape) for write in writes)
            if len(parts) < len(writes):
                problems.append(f"written twice: {name}, by {', '.join(senders)}")
            elif count != tensor.numel():
                problems.append(
                    f"missing: {name} gets {count:,} of its {tensor.numel():,} elements, "
                    f"from {', '.join(senders) or 'no tensor'}"
                )
        for name in self.manifest.keys() - used - set(spare):
            problems.append(f"unused: {name} {tuple(self.manifest[name])}")
        return problems


def part_of(tensor: Tensor) -> Part:
    """Names the part of its storage that a tensor is."""
    return Part(tensor.storage_offset(), tuple(tensor.shape), tensor.stride())


def storage_of(tensor: Tensor) -> int:
    """Returns a number that tensors share exactly where they share their memory."""
    return tensor.untyped_storage()._cdata
