"""The tracker of the memory that operations take: how much lives, and the most that did at once.

Invariant: each storage counts once, from the operation that makes it until it is freed.
"""

import weakref
from collections import Counter
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of what is made in its block, as "logits" and "activations".

    Args:
        module: whose weights, buffers and gradients do not count.
        vocabulary: a tensor of two dimensions or more whose last one is as large is logits.

    Attributes:
        now: bytes that live.
        peak: `now` when its sum was largest.
    """

    def __init__(self, module: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.now: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        # Storages that are counted, or must not be.
        self.known: set[int] = set()
        for tensor in [*module.parameters(), *module.buffers()]:
            self.known.add(tensor.untyped_storage()._cdata)
            if tensor.grad is not None:
                self.known.add(tensor.grad.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts what it makes."""
        outputs = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.count, outputs)
        if self.now.total() > self.peak.total():
            self.peak = self.now.copy()
        return outputs

    def count(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary
        term = "logits" if is_logits else "activations"
        size = storage.nbytes()
        self.known.add(key)
        self.now[term] += size
        weakref.finalize(storage, self._forget, key, term, size)

    def _forget(self, key: int, term: str, size: int) -> None:
        """Takes off a storage that is freed; another may get its address."""
        self.known.discard(key)
        self.now[term] -= size
