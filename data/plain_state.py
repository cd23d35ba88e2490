"""Copies what users' code keeps over a run into what a checkpoint can hold.

Invariant: what `plain_copy` returns is read again by `torch.load(weights_only=True)`, which runs no
code, and changes no more when the original does.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

# A checkpoint is read without code of anybody's, and so without larger numbers than these.
LARGEST_BITS = 2000
# Other mappings come back as a dict.
KEPT_MAPPINGS = (dict, OrderedDict, Counter)
KEPT_VALUES = (
    *(bool, int, float, complex, str, bytes),
    *(torch.Size, torch.dtype, torch.device),
)
# Their numbers are Python's own, bit by bit.
SCALARS = (np.bool_, np.integer, np.float64)


class CannotSave(ValueError):
    """Reports that a checkpoint cannot hold what it is to hold; it would never be readable."""


def kept_state(state: Any, owner: str, *, dicts_only: bool = False) -> Any:
    """Copies the state of a user's part of the run, as `plain_copy` does.

    Args:
        owner: whose state it is, for an error's text.
        dicts_only: refuse mappings that would come back as a dict: its owner reads it as it is, and
            not by a `load_state_dict`.
    Raises:
        CannotSave: it holds something that no checkpoint can keep; names owner, key and type.
    """
    try:
        return plain_copy(state, owner, dicts_only=dicts_only)
    except TypeError as error:
        raise CannotSave(str(error)) from error
    except RecursionError as error:
        raise CannotSave(
            f"{owner} holds itself, or is nested too deeply: a checkpoint cannot keep it"
        ) from error


def plain_copy(state: Any, place: str = "state_dict", *, dicts_only: bool = False) -> Any:
    """Copies a state; numpy's booleans, integers and float64 become Python's.

    Args:
        place: where it is, for an error's text.
        dicts_only: refuse mappings that would come back as a dict.
    Raises:
        TypeError: it holds something that no checkpoint can keep.
    """
    kind = type(state)
    if isinstance(state, Mapping) and (kind in KEPT_MAPPINGS or not dicts_only):
        copied = {}
        for key, value in state.items():
            inner = f"{place}[{key!r}]"
            copied[plain_copy(key, place)] = plain_copy(value, inner, dicts_only=dicts_only)
        return kind(copied) if kind in KEPT_MAPPINGS else copied
    if kind in (list, tuple, set):
        return kind([plain_copy(value, place, dicts_only=dicts_only) for value in state])
    if isinstance(state, SCALARS):
        state = state.item()
        kind = type(state)
    if kind is int and state.bit_length() > LARGEST_BITS:
        raise TypeError(f"{place} has a number that is too large for a checkpoint: use float()")
    if kind in (Tensor, torch.nn.Parameter):
        # One in the midst of a graph cannot be copied with it.
        return deepcopy(state) if state.is_leaf else state.detach().clone()
    if state is None or kind in KEPT_VALUES:
        return state
    raise TypeError(
        f"{place} has {_shown(state)}, a {kind.__name__}: a checkpoint keeps numbers, strings, "
        "tensors, and lists and dicts of them; use float(), .tolist(), list(), dict() or str()"
    )


def _shown(value: Any) -> str:
    """Writes a value in short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:79]}…"
