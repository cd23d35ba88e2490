"""What DataProto does with its dicts and arrays: object arrays, picking, merging, equality, and tensors as bytes.

Invariant: every function is pure; its arguments stay as they are.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

# Positions of rows, which may repeat, or a mask over all of them.
RowIndex: TypeAlias = Sequence[int] | Sequence[bool] | np.ndarray | Tensor


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Makes a 1-D object array, also of lists of one length, which numpy itself would make a matrix."""
    return np.fromiter(values, dtype=object, count=len(values))


def pick(part: dict[str, Any], keys: Sequence[str] | None, name: str) -> dict[str, Any]:
    """Returns the named entries, all of them for None; KeyError lists what `name` has."""
    if missing := [key for key in keys or [] if key not in part]:
        raise KeyError(f"{missing} not in {name}, which has: {', '.join(sorted(part)) or 'nothing'}")
    return dict(part) if keys is None else {key: part[key] for key in keys}


def union_dicts(mine: dict[str, Any], others: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the entries of both; ValueError where a shared one differs."""
    for key in mine.keys() & others.keys():
        if not same(mine[key], others[key]):
            raise ValueError(f"union: {name}[{key!r}] differs between the two; pop or rename it in one of them")
    return mine | others


def merge_meta_info(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the meta_info of concatenated parts: `metrics` are gathered into lists, all else must agree."""
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta_info in parts:
        for key, value in meta_info.items():
            if key == "metrics":
                for name, number in value.items():
                    metrics.setdefault(name, []).extend(number if isinstance(number, list) else [number])
            elif key in merged and not same(merged[key], value):
                raise ValueError(f"concat: meta_info[{key!r}] differs between the parts: {merged[key]!r}, {value!r}")
            else:
                merged[key] = value
    return merged | {"metrics": metrics} if metrics else merged


def same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, tensors and arrays also in shape and dtype; NaN equals NaN."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        b = b.to(a.device)
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return (
            same(a.tolist(), b.tolist()) if a.dtype == object else np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
        )
    # Plain Python first, it is fast; arrays inside have no truth value, so that is not the last word.
    with contextlib.suppress(ValueError, RuntimeError):
        if a == b:
            return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, float) and a != a and b != b


def to_bytes(tensor: Tensor) -> tuple[np.ndarray, torch.dtype, tuple[int, ...]]:
    """Packs a tensor as (bytes, dtype, shape); as bytes, because numpy has no bfloat16."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape)


def from_bytes(array: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Unpacks what `to_bytes` packed, on the CPU."""
    # Ray hands out read-only memory, and torch has no read-only tensors.
    return torch.from_numpy(array if array.flags.writeable else array.copy()).view(dtype).view(shape)
