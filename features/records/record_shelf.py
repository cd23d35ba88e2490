"""The room that a run's records take on disk: a budget, thinned out evenly.

Of more than the budget every other step goes, and later again every other: the first and the last
step, and those with alarms, stay longest. Invariant: the records never take more than the budget,
and leave the disk room for others.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from features.records.step_arrays import read_step_arrays

GIB = 1 << 30
# Bytes that are left free on the disk.
LEFT_FREE = 256 << 20
FILE_NAME = re.compile(r"(val-)?(\d+)\.(jsonl|npz)(\.tmp)?")
TOKENIZER = "tokenizer"


class Unit(NamedTuple):
    """Names what is kept or goes together: the files of a step, of training or of validation."""

    validate: bool
    step: int


class NoRoom(OSError):
    """Reports that records were left out, for want of room in the budget or on the disk."""


def unit_of(path: Path) -> Unit | None:
    """Returns the unit that a file is of; None of any other file."""
    name = FILE_NAME.fullmatch(path.name)
    if name is None:
        return None
    return Unit(validate=name[1] is not None, step=int(name[2]))


def record_files(folder: Path) -> list[Path]:
    """Lists a folder's files of records."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if unit_of(path) is not None)


class RecordShelf:
    """Keeps the files of records of one folder within a budget.

    Args:
        folder: where they lie.
        most_bytes: the budget.
    """

    def __init__(self, folder: Path, most_bytes: float) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.alarm_steps: set[int] = set()
        self._sizes: dict[Unit, int] | None = None

    @property
    def sizes(self) -> dict[Unit, int]:
        """Returns the bytes of each unit, those that lay there before included."""
        if self._sizes is None:
            self._sizes = {}
            for path in record_files(self.folder):
                self._count(path)
                self._find_alarms(path)
        return self._sizes

    def append(self, unit: Unit, path: Path, content: bytes, *, anew: bool) -> None:
        """Adds to a file, or writes it anew; what has no room leaves the file as it was.

        Raises:
            OSError: the disk is full, say; NoRoom where the records would be the ones to fill it.
        """
        self._make_room(unit, len(content))
        self.folder.mkdir(parents=True, exist_ok=True)
        before = 0 if anew or not path.exists() else path.stat().st_size
        try:
            with path.open("wb" if anew else "ab") as file:
                file.write(content)
        except OSError:
            os.truncate(path, before)
            if before == 0:
                path.unlink()
            raise
        finally:
            self._count_unit(unit)

    def write(self, unit: Unit, path: Path, size: int, save: Callable[[Path], None]) -> None:
        """Has `save` write a file of about so many bytes, under a temporary name first.

        Raises: as `append`.
        """
        self._make_room(unit, size)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        try:
            save(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
            self._count_unit(unit)

    def cut_back(self, step: int, kept: frozenset[int] = frozenset()) -> None:
        """Removes what is of steps behind `step`, but for the episodes of the steps in `kept`."""
        for path in record_files(self.folder):
            unit = unit_of(path)
            if unit is None or unit.step <= step:
                continue
            is_kept = unit.step in kept and path.suffix == ".jsonl" and not unit.validate
            if not is_kept:
                path.unlink()
        self._sizes = None

    def set_aside(self) -> None:
        """Moves all records to FOLDER.old, out of the way of a run that begins."""
        files = record_files(self.folder)
        # A run that ended before its first record leaves the tokenizer alone.
        if not files and not (self.folder / TOKENIZER).is_dir():
            return
        aside = self.folder.with_name(self.folder.name + ".old")
        for old in record_files(aside):
            old.unlink()
        aside.mkdir(parents=True, exist_ok=True)
        for path in files:
            path.replace(aside / path.name)
        if (self.folder / TOKENIZER).is_dir():
            shutil.rmtree(aside / TOKENIZER, ignore_errors=True)
            (self.folder / TOKENIZER).replace(aside / TOKENIZER)
        self._sizes = None

    def _count(self, path: Path) -> None:
        unit = unit_of(path)
        if unit is not None:
            self.sizes[unit] = self.sizes.get(unit, 0) + path.stat().st_size

    def _count_unit(self, unit: Unit) -> None:
        """Counts a unit's files again."""
        prefix = "val-" if unit.validate else ""
        size = 0
        for suffix in ("jsonl", "npz"):
            path = self.folder / f"{prefix}{unit.step}.{suffix}"
            if path.exists():
                size += path.stat().st_size
        self.sizes[unit] = size

    def _find_alarms(self, path: Path) -> None:
        """Notes whether an earlier process's step had alarms."""
        if path.suffix != ".npz":
            return
        try:
            meta, _ = read_step_arrays(path)
        # It says nothing of its alarms, then.
        except (OSError, ValueError, KeyError):
            return
        if meta["metrics"].get("alarms/count"):
            self.alarm_steps.add(int(meta["step"]))

    def _make_room(self, unit: Unit, size: int) -> None:
        """Removes records until so many bytes more have room.

        Raises:
            NoRoom: they would not have it beside the first and the last step either.
        """
        there = self.folder
        while not there.exists():
            there = there.parent
        used = sum(self.sizes.values())
        most_bytes = min(self.most_bytes, used + shutil.disk_usage(there).free - LEFT_FREE)
        while used + size > most_bytes:
            victim = self._next_to_go(unit)
            if victim is None:
                raise NoRoom(
                    f"{size / GIB:.3f} GiB more have no room in {self.folder}: "
                    f"records.keep_gib={self.most_bytes / GIB:g} GiB, and the disk has "
                    f"{shutil.disk_usage(there).free / GIB:.1f} GiB free"
                )
            used -= self._remove(victim)

    def _next_to_go(self, current: Unit) -> Unit | None:
        """Chooses the unit that goes next: the one whose neighbours are nearest to each other."""
        others = [unit for unit in self.sizes if unit != current]
        bytes_of_kind = {
            kind: sum(self.sizes[unit] for unit in self.sizes if unit.validate == kind)
            for kind in (False, True)
        }
        for keeps_alarms in (True, False):
            for kind in sorted(bytes_of_kind, key=lambda kind: -bytes_of_kind[kind]):
                steps = sorted(unit.step for unit in self.sizes if unit.validate == kind)
                candidates = [
                    (after - before, step)
                    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
                    if not (keeps_alarms and step in self.alarm_steps)
                    and Unit(kind, step) != current
                ]
                if candidates:
                    return Unit(kind, min(candidates)[1])
        # The ends are left: the earliest goes first.
        return min(others, key=lambda unit: unit.step, default=None)

    def _remove(self, unit: Unit) -> int:
        """Removes a unit's files; returns how many bytes they took."""
        prefix = "val-" if unit.validate else ""
        for suffix in ("jsonl", "npz"):
            (self.folder / f"{prefix}{unit.step}.{suffix}").unlink(missing_ok=True)
        return self.sizes.pop(unit)
