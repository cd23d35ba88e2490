"""Writes data as scripts, which a page that was opened from the disk may load.

A browser lets such a page read no file but scripts and styles. So a data file is

    viewerData("list/0", "eJy…");

with base64 of deflate of: the header's length (4 bytes, little endian), the header in JSON, blanks
up to a multiple of 8, and the arrays, each beginning at a multiple of 8. The header's `arrays` says
by name [dtype, entries, first byte, repeated]: an array whose entries are all equal is kept as one
entry that is repeated so often, and one that is equal to an earlier one as its name.

Invariant: a reader that looks at the same bytes sees the same numbers, bit for bit; what is not
finite stays as it is in arrays, and is written as text in headers.
"""

import base64
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 8
# A record's own lists and dicts are shown down to here.
MOST_NESTED = 60
# A record's own lists and dicts lie in fewer of a page's.
MOST_AROUND = 10
# Types whose values are in JSON as they are.
PLAIN_TYPES = frozenset({str, int, bool, type(None)})
# Small dtypes that JavaScript has typed arrays for.
DTYPES = {"<f4", "<f8", "<i4", "<i2", "|i1", "|u1", "<u4", "<u2"}
# Values that hold no others, and that JSON nearly always has as they are.
LEAF_TYPES = PLAIN_TYPES | {float}
ENCODER = json.JSONEncoder(allow_nan=False)
SORTING_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True)


@cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype in little endian; asked for each array, and there are many."""
    return dtype.newbyteorder("<").str


def pack(
    header: dict[str, Any],
    arrays: dict[str, np.ndarray],
    encoded: Mapping[str, str] | None = None,
) -> bytes:
    """Puts a header and 1-D arrays into one block of bytes, as the top of this file says.

    Args:
        header: in JSON's types, as `plain` returns it.
        encoded: further entries of the header, which come first, as JSON's text.
    """
    described: dict[str, Any] = {}
    blocks: list[bytes] = []
    names_of_bytes: dict[tuple[str, bytes], str] = {}
    position = 0
    for name, array in arrays.items():
        dtype = _name_of(array.dtype)
        if dtype not in DTYPES:
            raise ValueError(f"an array of {array.dtype} has no counterpart in a page: {name}")
        data = np.ascontiguousarray(array, dtype=dtype).tobytes()
        content = (dtype, data)
        same = names_of_bytes.get(content)
        if same is not None and len(data) > ALIGNMENT:
            described[name] = same
            continue
        names_of_bytes[content] = name
        repeated = 0
        one = data[: array.itemsize]
        # The last entry is looked at first: most arrays begin and end otherwise.
        if len(array) > 1 and data.endswith(one) and data == one * len(array):
            repeated, data = len(array), one
        entries = len(data) // array.itemsize
        described[name] = [dtype, entries, position, repeated]
        padding = -len(data) % ALIGNMENT
        blocks += [data, bytes(padding)]
        position += len(data) + padding
    whole = ENCODER.encode({**header, "arrays": described})
    if encoded:
        first = [f"{ENCODER.encode(name)}: {text}" for name, text in encoded.items()]
        whole = "{" + ", ".join([*first, whole[1:]])
    text = whole.encode()
    text += b" " * (-(len(text) + 4) % ALIGNMENT)
    return b"".join([len(text).to_bytes(4, "little"), text, *blocks])


def plain(value: Any, depth: int = 0) -> Any:
    """Returns what JSON can hold: numbers that are not finite, and other objects, as text.

    What lies more than MOST_NESTED deep is left out.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if isinstance(value, dict | list | tuple) and depth == MOST_NESTED:
        return "…"
    below = depth + 1
    # Nearly all entries are plain: a call for each would take most of the time.
    if isinstance(value, dict):
        return {
            str(key): entry if type(entry) in PLAIN_TYPES else plain(entry, below)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [entry if type(entry) in PLAIN_TYPES else plain(entry, below) for entry in value]
    if isinstance(value, np.generic):
        return plain(value.item(), depth)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, str | int | float):
        return value
    return str(value)


def encode(
    value: Any, *, recorded: Sequence[Any] | None = None, encoder: json.JSONEncoder = ENCODER
) -> str:
    """Returns the JSON of `plain(value)`, for a value whose keys are texts or integers.

    Nearly all values are plain as they are, which the encoder finds out by itself, and faster.

    Args:
        recorded: the parts of `value` that may be nested deep, if not all may; none of them lies
            more than MOST_AROUND deep in it.
    """
    if _is_shallow([value] if recorded is None else recorded, MOST_NESTED - MOST_AROUND):
        try:
            return encoder.encode(value)
        except (TypeError, ValueError):
            # It holds a number that is not finite, or another object.
            pass
    return encoder.encode(plain(value))


def _is_shallow(values: Iterable[Any], room: int) -> bool:
    """Returns whether no list or dict lies more than `room` deep in those of these values."""
    for value in values:
        if type(value) in LEAF_TYPES or not isinstance(value, dict | list | tuple):
            continue
        entries = value.values() if isinstance(value, dict) else value
        if LEAF_TYPES.issuperset(map(type, entries)):
            continue
        if room == 0 or not _is_shallow(entries, room - 1):
            return False
    return True


def unpack(packed: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the header and the arrays that `pack` was given."""
    start = 4 + int.from_bytes(packed[:4], "little")
    header = json.loads(packed[4:start])
    arrays: dict[str, np.ndarray] = {}
    for name, entry in header.pop("arrays").items():
        if isinstance(entry, str):
            arrays[name] = arrays[entry]
            continue
        dtype, entries, position, repeated = entry
        array = np.frombuffer(packed, dtype=dtype, count=entries, offset=start + position)
        arrays[name] = np.repeat(array, repeated) if repeated else array
    return header, arrays


class DataFolder:
    """Writes the data files of a viewer, each at once: a page never reads half of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: set[Path] = set()

    def path(self, name: str) -> Path:
        """Returns FOLDER/NAME.js."""
        return self.folder / f"{name}.js"

    def write(
        self,
        name: str,
        header: dict[str, Any],
        arrays: dict[str, np.ndarray],
        encoded: Mapping[str, str] | None = None,
    ) -> None:
        """Writes FOLDER/NAME.js. Args: those of `pack`."""
        packed = zlib.compress(pack(header, arrays, encoded), level=1)
        text = f'viewerData("{name}","{base64.b64encode(packed).decode()}");\n'
        path = self.path(name)
        if path.parent not in self._made:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(path.parent)
        beginning = path.with_suffix(".tmp")
        beginning.write_text(text)
        beginning.replace(path)

    def read(self, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Reads back what `write` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        text = self.path(name).read_text()
        beginning, end = f'viewerData("{name}","', '");\n'
        if not text.startswith(beginning) or not text.endswith(end):
            raise ValueError(f"{self.path(name)} is no data file of a viewer")
        packed = base64.b64decode(text[len(beginning) : -len(end)])
        try:
            return unpack(zlib.decompress(packed))
        except zlib.error as error:
            raise ValueError(f"{self.path(name)} cannot be read: {error}") from error
