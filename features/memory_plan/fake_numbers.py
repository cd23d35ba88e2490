"""Tensors without numbers, also where PyTorch's own take bfloat16 alone.

Invariant: an operation's output has the shape and type that it has in a run.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

# The product of experts with their tokens. Without numbers PyTorch refuses float32, which it
# computes on a CPU.
GROUPED = torch.ops.aten._grouped_mm.default


class FakeNumbers(FakeTensorMode):
    """Makes tensors without numbers; see this file's docstring."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation on shapes."""
        if func is GROUPED and args[0].dtype != torch.bfloat16:
            options = kwargs or {}
            return _grouped_product(*args, **options)
        return super().dispatch(func, types, args, kwargs)


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Makes the output of a grouped product.

    Experts' weights (E, K, N) with tokens (T, K) give (T, N); the gradient of the weights, of
    (K, T) and (T, N) cut at `offs` (E,), is (E, K, N).
    """
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim() == 2:
        assert offs is not None, "two matrices are cut into groups by offsets"
        shape = [offs.shape[0], *shape]
    elif a.dim() == b.dim() == 3:
        shape = [a.shape[0], *shape]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
