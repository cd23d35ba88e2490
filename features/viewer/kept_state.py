"""Remembers what a viewer was made of, so that a run's next one converts only what is new.

data/state.json says which files of records were read, with their sizes and times, and where the
builder stood behind the last of them. Invariant: a state that does not fit (another version of this
feature made it, a file of records was changed, removed or came in between, a data file is missing)
is no state, and the viewer is made anew from all records.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from features.shared import ELEMENTS
from features.viewer.data_files import DataFolder
from features.viewer.parts import ViewerPart
from features.viewer.records import RecordFile

NAME = "state.json"
# A training step whose columns are not there yet may get them so many steps later.
LATE_STEPS = 16
HERE = Path(__file__).parent


@dataclass
class BuilderState:
    """Holds where a builder stands behind a file of records; all in JSON's types but `parts`.

    Attributes:
        files: what was read, a list [name, size, time, size of the columns, their time] each.
        pages, text_pages, next_part: numbers of what is written next.
        parts: those of the list and the index.
        steps, fates, columns: what the manifest says of them.
        report: the counts and faults of a ViewerReport.
    """

    files: list[list[Any]] = field(default_factory=list)
    episodes: int = 0
    pages: int = 0
    text_pages: int = 0
    next_part: int = 0
    parts: list[ViewerPart] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    fates: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KeptState:
    """Holds what a viewer's folder says of itself.

    Attributes:
        builder: where to go on.
        parts: all whose files lie in the folder.
        shown: numbers of those that its manifest names.
    """

    builder: BuilderState
    parts: list[ViewerPart]
    shown: list[int]


@cache
def version() -> str:
    """Returns what tells this version of the feature from others: a digest of its files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in [ELEMENTS, *sorted(HERE.glob("*.py")), *sorted((HERE / "assets").iterdir())]:
        if path.is_file():
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def stamp(file: RecordFile) -> list[Any]:
    """Returns what tells a file of records, and its columns, from another state of them."""
    stamps: list[Any] = [file.path.name]
    paths = [file.path] if file.kind == "val" else [file.path, file.update_path]
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            stamps += [-1, -1]
        else:
            stamps += [found.st_size, found.st_mtime_ns]
    return stamps


def count_settled(files: Sequence[RecordFile], *, goes_on: bool) -> int:
    """Returns how many of the files, from the first on, are not written to any more.

    That is all of a run that has ended. Of one that goes on, the newest step may not be whole, and
    the columns of one before may be yet to come.
    """
    if not goes_on or not files:
        return len(files)
    newest = files[-1].step
    has_columns = {
        file.step for file in files if file.kind == "train" and file.update_path.exists()
    }
    for place, file in enumerate(files):
        is_late = file.kind == "train" and file.step not in has_columns and bool(has_columns)
        if file.step >= newest or (is_late and file.step > newest - LATE_STEPS):
            return place
    return len(files)


def write_state(
    data: Path, key: str, builder: BuilderState, parts: Sequence[ViewerPart], shown: Sequence[int]
) -> None:
    """Writes DATA/state.json at once."""
    told = {
        "version": version(),
        "key": key,
        "builder": asdict(builder),
        "parts": [asdict(part) for part in parts],
        "shown": list(shown),
    }
    beginning = data / f"{NAME}.tmp"
    beginning.write_text(json.dumps(told))
    beginning.replace(data / NAME)


def read_state(data: Path, key: str, files: Sequence[RecordFile]) -> KeptState | None:
    """Reads DATA/state.json; None where it is not there, or does not fit.

    Args:
        key: what names the run, and all else that its pages depend on.
        files: the run's files of records as they are now.
    """
    try:
        told = json.loads((data / NAME).read_text())
        if told["version"] != version() or told["key"] != key:
            return None
        entries = told["builder"]
        entries["parts"] = [ViewerPart(**part) for part in entries["parts"]]
        builder = BuilderState(**entries)
        parts = [ViewerPart(**part) for part in told["parts"]]
        shown = [int(number) for number in told["shown"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if builder.files != [stamp(file) for file in files[: len(builder.files)]]:
        return None
    folder = DataFolder(data)
    names = [name for part in builder.parts for name in part.files_of()]
    if not all(folder.path(name).is_file() for name in names):
        return None
    return KeptState(builder, parts, shown)
