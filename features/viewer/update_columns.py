"""Reads what a step's update was given, from STEP.npz: columns of rows and of tokens.

The file is mapped, not read, so that memory does not grow with a step. Invariant: every token
column that is offered has as many entries as the offsets say.
"""

import json
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROW_COLUMNS = (
    "episode_id",
    "uid",
    "episode_row",
    "times_trained",
    "gradient_share",
    "reward_baselines",
    "role",
)
# The length of a zip entry's own header, before its name.
LOCAL_HEADER = 30


@dataclass(frozen=True)
class UpdateColumns:
    """Holds the columns of a step's update.

    Attributes:
        meta: the file's `meta`, see features/records/README.md.
        rows: by name a column (n,).
        tokens: by name a column (all tokens of responses,), mapped from the file.
        offsets: (n + 1,) int64 into the token columns.
        faults: what of the file could not be used, in sentences.
    """

    meta: dict[str, Any]
    rows: dict[str, np.ndarray]
    tokens: dict[str, np.ndarray]
    offsets: np.ndarray
    faults: tuple[str, ...]

    def find_rows(self) -> dict[tuple[str, int], int]:
        """Returns the number of each row by its episode's id and its number in the episode.

        A row that was drawn several times is found at its first place.
        """
        places: dict[tuple[str, int], int] = {}
        ids = self.rows["episode_id"].tolist()
        numbers = self.rows["episode_row"].tolist()
        for place, key in enumerate(zip(ids, numbers, strict=True)):
            places.setdefault(key, place)
        return places

    def of_row(self, row: int) -> dict[str, np.ndarray]:
        """Returns by name the tokens of one row, (response length,) each."""
        tokens = slice(int(self.offsets[row]), int(self.offsets[row + 1]))
        return {name: column[tokens] for name, column in self.tokens.items()}

    def dropped(self) -> dict[str, str]:
        """Returns by episode why it never reached the update: the name of a fate."""
        entries = self.meta.get("dropped") or []
        return {
            str(entry["episode_id"]): str(entry.get("why", ""))
            for entry in entries
            if isinstance(entry, dict) and "episode_id" in entry
        }


def read_update(path: Path) -> UpdateColumns:
    """Maps a file's columns.

    Raises:
        ValueError: it is damaged, or of a form that is not known; the text says which.
    """
    try:
        arrays = map_arrays(path)
        meta = json.loads(str(arrays.pop("meta")[()]))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, struct.error) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(meta, dict) or meta.get("format") != 1:
        raise ValueError(f"{path.name} is of a form that this viewer does not know (format 1)")
    needed = [name for name in ("episode_id", "episode_row", "offsets") if name not in arrays]
    if needed:
        raise ValueError(f"{path.name} lacks {', '.join(needed)}")
    offsets = np.asarray(arrays.pop("offsets"), dtype=np.int64)
    size = len(arrays["episode_id"])
    fits = len(offsets) == size + 1 and (np.diff(offsets) >= 0).all() and offsets[0] == 0
    if not fits:
        raise ValueError(f"{path.name}: its offsets do not fit its {size} rows")
    rows, tokens, faults = {}, {}, []
    for name, array in arrays.items():
        if name in ROW_COLUMNS and array.shape == (size,):
            rows[name] = np.asarray(array)
        elif name not in ROW_COLUMNS and array.shape == (int(offsets[-1]),) and _is_number(array):
            tokens[name] = array
        else:
            faults.append(f"{path.name}: {name} is {array.dtype} {array.shape} and is left out")
    if not {"episode_id", "episode_row"} <= rows.keys():
        raise ValueError(f"{path.name}: its rows have no names of one length")
    return UpdateColumns(meta, rows, tokens, offsets, tuple(faults))


def _is_number(array: np.ndarray) -> bool:
    """Returns whether a page can hold the array's entries."""
    return array.dtype.kind in "biuf" and array.itemsize <= 8


def map_arrays(path: Path) -> dict[str, np.ndarray]:
    """Maps the arrays of an uncompressed npz; text and empty ones are read.

    Raises:
        ValueError: an array is of objects, compressed, or longer than the file.
    """
    arrays: dict[str, np.ndarray] = {}
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            file.seek(entry.header_offset)
            header = file.read(LOCAL_HEADER)
            name_length, extra_length = struct.unpack("<HH", header[26:30])
            file.seek(name_length + extra_length, 1)
            version = np.lib.format.read_magic(file)
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
            else:
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(file)
            if dtype.hasobject or (fortran and len(shape) > 1):
                raise ValueError(f"{entry.filename} is no plain array")
            length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            if file.tell() + length > size:
                raise ValueError(f"{entry.filename} is cut short")
            name = entry.filename.removesuffix(".npy")
            if length == 0 or shape == ():
                data = file.read(length)
                arrays[name] = np.frombuffer(data, dtype=dtype).reshape(shape)
            else:
                mapped = np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)
                # As a plain array its parts are cut out in a third of the time.
                arrays[name] = mapped.view(np.ndarray)
    return arrays
