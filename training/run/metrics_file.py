"""Writes and reads files of JSON lines that have a step each, as metrics.jsonl.

Invariant: a file holds whole lines only, one JSON object each, in the order of the steps, also
after a crash and a resume; a new run keeps what it finds there as FILE.old.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from data.own_names import keep_own
from data.texts import with_printable_names
from training.config.plain_files import plain_lines
from training.run.files import naming, open_in_folder, write_atomically

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
# How metrics.jsonl writes numbers that JSON has no form for.
NOT_FINITE = ("nan", "inf", "-inf")
# A line of metrics.jsonl is shorter than this.
LAST_BYTES = 1 << 20
# No run gets further.
LAST_STEP = 2**31 - 1
Reader = Callable[[Path], Iterator[dict[str, Any]]]


class LineFile:
    """A file of JSON lines that is appended to; it is made by `open`, or by its first line.

    Args:
        resume_step: lines of later steps, and damaged ones, are cut; 0: the old file is set aside.
        read: yields the entries of an old file, which have a `step`.
    """

    def __init__(self, path: Path, resume_step: int, read: Reader) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # An empty file does not take the place of an older one.
        if path.exists() and path.stat().st_size > 0:
            if resume_step > 0:
                cut_back(path, resume_step, read)
            else:
                path.replace(path.with_name(path.name + ".old"))
        self.path = path
        self.file: Any = None

    def open(self) -> None:
        """Opens the file, unbuffered: what cannot be written is taken back, not written later."""
        if self.file is None:
            self.file = open_in_folder(self.path, "ab")

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes a line and forces it to disk; a line without room leaves nothing."""
        self.open()
        line = (json.dumps(entry) + "\n").encode()
        before = self.file.seek(0, os.SEEK_END)
        try:
            with naming(self.path):
                while line:
                    line = line[self.file.write(line) :]
                os.fsync(self.file.fileno())
        except OSError:
            self.file.truncate(before)
            raise

    def close(self) -> None:
        """Closes the file, if it is open."""
        if self.file is not None:
            self.file.close()


def as_record(data: Mapping[str, float], step: int) -> dict[str, float | str]:
    """Returns a step's entry, whose values are numbers that JSON has, or NOT_FINITE."""
    record: dict[str, float | str] = {"step": step}
    for key, value in keep_own(data, record, "a step's metrics").items():
        record[key] = value if math.isfinite(value) else str(value)
    return record


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the steps of a metrics file; a line that holds none, or part of one, is said."""
    for number, record in _objects(path):
        wrong = [key for key, value in record.items() if not _is_number(value)]
        if wrong:
            _say_damaged(path, number, ValueError(f"{wrong[0]!r} is no number"))
        else:
            # An older file may have others.
            yield with_printable_names(record)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the entries of a file whose lines are objects with a step, whatever else they hold."""
    for _, entry in _objects(path):
        yield entry


def last_recorded_step(run_dir: Path) -> int:
    """Reads the last step that a run logged, from the end of its metrics.jsonl; 0: none."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LAST_BYTES))
        lines = file.read().decode("utf-8", errors="replace").split("\n")
    for line in reversed(lines):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            return int(record["step"])
    return 0


def cut_back(path: Path, resume_step: int, read: Reader = read_records) -> None:
    """Drops a file's lines after `resume_step`, and damaged ones, in one rename."""
    lines = []
    for record in read(path):
        if record["step"] <= resume_step:
            lines.append(json.dumps(record) + "\n")
    write_atomically(path, "".join(lines))


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the lines that are objects with a step, with their number; says which are damaged."""
    for number, content in enumerate(plain_lines(path), start=1):
        line = content.decode("utf-8", errors="replace")
        if not line.strip():
            continue
        try:
            yield number, _read_object(line)
        except (ValueError, RecursionError) as error:
            _say_damaged(path, number, error)


def _read_object(line: str) -> dict[str, Any]:
    """Reads a line; ValueError where it is not JSON, or has no step."""
    record = json.loads(line)
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError('it has no "step", which is a whole number')
    if not 0 <= record["step"] <= LAST_STEP:
        raise ValueError(f'its "step" is none that a run reaches: 0 to {LAST_STEP}')
    return record


def _say_damaged(path: Path, number: int, error: Exception) -> None:
    logger.warning("%s, line %d, is damaged and left out: %s", path, number, error)


def _is_number(value: object) -> bool:
    """Checks whether a value is a number, or names one that is not finite."""
    return type(value) in (int, float) or value in NOT_FINITE
