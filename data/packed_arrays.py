"""Arrays as JSON holds them: `{"dtype": "<i4", "base64": "..."}`, little endian, one dimension.

It takes a third of the room, and a twentieth of the time, of a list of numbers. Invariant: what is
packed comes back bit for bit, and plain lists are read too.
"""

from __future__ import annotations

import base64
import sys
from array import array
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The dtypes that files hold; anything else in one is damage.
DTYPES = ("<i4", "<f4", "|i1", "<i2")
PackedArray = dict[str, str]


# By the type codes of Python's own arrays, which hold rows while they grow.
DTYPE_OF_CODE = {"i": "<i4", "f": "<f4", "b": "|i1", "h": "<i2"}


def pack_typed(values: array[int] | array[float]) -> PackedArray:
    """Packs one of Python's own arrays, of the types in DTYPE_OF_CODE."""
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    text = b2a_base64(values, newline=False).decode("ascii")
    return {"dtype": DTYPE_OF_CODE[values.typecode], "base64": text}


def pack_array(values: Any, dtype: str) -> PackedArray:
    """Packs numbers, in any form that numpy reads, as an array of one of DTYPES."""
    array = np.asarray(values, dtype=dtype)
    return {"dtype": dtype, "base64": base64.b64encode(array.tobytes()).decode("ascii")}


def unpack_array(packed: Mapping[str, str] | Sequence[float | None], dtype: str) -> np.ndarray:
    """Returns the array that was packed, or makes one of a plain list, whose null becomes NaN.

    Args:
        dtype: of a plain list.

    Raises:
        ValueError: it is neither, or of another dtype than DTYPES.
    """
    if not isinstance(packed, Mapping):
        return np.array([np.nan if value is None else value for value in packed], dtype=dtype)
    try:
        name = packed["dtype"]
        content = base64.b64decode(packed["base64"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it is no packed array: {error}") from error
    if name not in DTYPES:
        raise ValueError(f"an array of dtype {name!r}; allowed: {', '.join(DTYPES)}")
    return np.frombuffer(content, dtype=name).copy()
