"""Compares, merges and slices the dicts, arrays and tensors that DataProto is made of.

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
# Names of fields; None: all of them.
Keys: TypeAlias = Sequence[str] | None
# As float32 these take 2 MiB, which go back to the system when freed (workers/ranks/memory.py).
BLOCK_ENTRIES = 1 << 19


class BatchError(ValueError, AssertionError):
    """Says what is wrong with the parts of a batch; verl's users catch the second kind."""


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Makes a 1-D object array, also of lists of one length, which numpy would make a matrix."""
    return np.fromiter(values, dtype=object, count=len(values))


def pick(part: dict[str, Any], keys: Keys, name: str) -> dict[str, Any]:
    """Returns the named entries, all of them for None; KeyError lists what `name` has."""
    if keys is None:
        return dict(part)
    missing = [key for key in keys if key not in part]
    if missing:
        there = ", ".join(sorted(part)) or "nothing"
        raise KeyError(f"{missing} not in {name}, which has: {there}")
    return {key: part[key] for key in keys}


def union_dicts(mine: dict[str, Any], others: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the entries of both; BatchError where a shared one differs."""
    for key in mine.keys() & others.keys():
        if not same(mine[key], others[key]):
            raise BatchError(
                f"union: {name}[{key!r}] differs between the two; pop or rename it in one of them"
            )
    return mine | others


def merge_meta_info(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges the meta_info of concatenated parts: `metrics` are gathered into lists.

    All else must agree. A part's metrics are a dict, name -> number or list, or a list of such
    dicts.
    """
    merged: dict[str, Any] = {}
    metrics: dict[str, list[Any]] = {}
    for meta_info in parts:
        for key, value in meta_info.items():
            if key == "metrics":
                _gather_metrics(metrics, value)
            elif key in merged and not same(merged[key], value):
                raise BatchError(
                    f"concat: meta_info[{key!r}] differs between the parts: "
                    f"{merged[key]!r}, {value!r}"
                )
            else:
                merged[key] = value
    if metrics:
        merged["metrics"] = metrics
    return merged


def _gather_metrics(metrics: dict[str, list[Any]], value: Any) -> None:
    """Adds a part's metrics to the lists."""
    entries = value if isinstance(value, list) else [value]
    for entry in entries:
        for name, number in entry.items():
            numbers = number if isinstance(number, list) else [number]
            metrics.setdefault(name, []).extend(numbers)


def same(a: Any, b: Any) -> bool:
    """Checks whether two values are equal.

    Tensors and arrays must agree in shape and dtype, too; NaN equals NaN.
    """
    if a is b:
        return True
    if isinstance(a, Tensor | np.ndarray) and isinstance(b, type(a)):
        return _same_arrays(a, b)
    # Plain Python first, it is fast; arrays inside have no truth value, so that is not the last
    # word.
    with contextlib.suppress(ValueError, RuntimeError):
        if a == b:
            return True
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    # Only NaN differs from itself.
    return isinstance(a, float) and a != a and b != b


def _same_arrays(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype == object:
        return same(a.tolist(), b.tolist())
    if isinstance(b, Tensor):
        b = b.to(a.device)
    equal = a == b
    if equal.all():
        return True
    both_are_nan = (a != a) & (b != b)
    return bool((equal | both_are_nan).all())


def row_blocks(matrix: Tensor, entries: int = BLOCK_ENTRIES) -> list[slice]:
    """Cuts rows so that what is computed of a block has about `entries` entries."""
    size = max(1, entries // max(1, matrix[:1].numel()))
    return [slice(start, start + size) for start in range(0, max(1, len(matrix)), size)]


def row_sums(matrix: Tensor) -> Tensor:
    """Sums each row, of integers as int64, without a copy of the matrix: (B,)."""
    return torch.cat([matrix[rows].sum(-1) for rows in row_blocks(matrix)])
