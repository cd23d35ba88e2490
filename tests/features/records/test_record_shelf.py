"""Records within a budget: what goes first, a full disk, a resume, a new run in an old folder."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from features.records.record_shelf import LEFT_FREE, NoRoom, RecordShelf, Unit

SIZE = 100
Usage = namedtuple("Usage", ["total", "used", "free"])


def fill(shelf: RecordShelf, steps: range, *, validate: bool = False) -> None:
    prefix = "val-" if validate else ""
    for step in steps:
        path = shelf.folder / f"{prefix}{step}.jsonl"
        shelf.append(Unit(validate, step), path, b"x" * SIZE, anew=True)


def steps_of(folder: Path, pattern: str = "*.jsonl") -> list[int]:
    return sorted(int(path.stem) for path in folder.glob(pattern) if path.stem.isdigit())


def test_of_more_than_the_budget_steps_go_evenly_and_the_ends_stay(tmp_path: Path) -> None:
    shelf = RecordShelf(tmp_path, 16 * SIZE)
    fill(shelf, range(1, 201))
    kept = steps_of(tmp_path)
    assert len(kept) == 16 and kept[0] == 1 and kept[-1] == 200
    # The last ones have not been thinned out yet.
    gaps = np.diff(kept)[:-2]
    assert gaps.max() <= 2 * gaps.min(), kept
    assert sum(shelf.sizes.values()) == 16 * SIZE


def test_steps_with_alarms_stay_longest(tmp_path: Path) -> None:
    shelf = RecordShelf(tmp_path, 8 * SIZE)
    shelf.alarm_steps |= {3, 50}
    fill(shelf, range(1, 101))
    assert {1, 3, 50, 100} <= set(steps_of(tmp_path))
    # Where there are too many of them, they go, too.
    shelf.alarm_steps |= set(range(101, 151))
    fill(shelf, range(101, 151))
    assert len(steps_of(tmp_path)) == 8 and {1, 150} <= set(steps_of(tmp_path))


def test_an_earlier_processes_records_and_alarms_count(tmp_path: Path) -> None:
    fill(RecordShelf(tmp_path, 1e9), range(1, 11))
    meta = json.dumps({"step": 4, "metrics": {"alarms/count": 1.0}})
    np.savez(tmp_path / "4.npz", meta=np.array(meta))
    (tmp_path / "5.npz").write_bytes(b"no archive")
    shelf = RecordShelf(tmp_path, 1e9)
    assert shelf.sizes[Unit(False, 4)] == SIZE + (tmp_path / "4.npz").stat().st_size
    assert shelf.alarm_steps == {4}


def test_validations_are_thinned_out_by_themselves(tmp_path: Path) -> None:
    shelf = RecordShelf(tmp_path, 10 * SIZE)
    fill(shelf, range(6), validate=True)
    fill(shelf, range(1, 31))
    validations = {path.name for path in tmp_path.glob("val-*")}
    assert {"val-0.jsonl", "val-5.jsonl"} <= validations
    assert {1, 30} <= set(steps_of(tmp_path)) and len(list(tmp_path.iterdir())) == 10


def test_a_step_that_is_larger_than_the_budget_is_left_out(tmp_path: Path) -> None:
    shelf = RecordShelf(tmp_path, 3 * SIZE)
    fill(shelf, range(1, 3))
    with pytest.raises(NoRoom, match=r"records\.keep_gib"):
        shelf.append(Unit(False, 3), tmp_path / "3.jsonl", b"x" * 4 * SIZE, anew=True)
    assert not (tmp_path / "3.jsonl").exists()


def test_the_disk_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = RecordShelf(tmp_path, 1e9)
    fill(shelf, range(1, 9))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, LEFT_FREE - 2 * SIZE))
    # Its own records make way; then there is room for six of them.
    fill(shelf, range(9, 10))
    assert len(steps_of(tmp_path)) == 6 and 9 in steps_of(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0))
    with pytest.raises(NoRoom):
        fill(shelf, range(10, 11))


class HalfFile:
    """A file that takes half of what is written, then has no space left."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __enter__(self) -> HalfFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self.file.close()

    def write(self, content: bytes) -> int:
        self.file.write(content[: len(content) // 2])
        self.file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_full_disk_cuts_short_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = RecordShelf(tmp_path, 1e9)
    fill(shelf, range(1, 2))
    path = tmp_path / "1.jsonl"
    whole = Path.open
    opened: list[Path] = []

    def half(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = whole(self, mode, *args, **kwargs)
        opened.append(self)
        return HalfFile(file) if len(opened) == 1 else file

    monkeypatch.setattr(Path, "open", half)
    with pytest.raises(OSError, match="No space"):
        shelf.append(Unit(False, 1), path, b"y" * SIZE, anew=False)
    monkeypatch.undo()
    assert path.read_bytes() == b"x" * SIZE
    assert shelf.sizes[Unit(False, 1)] == SIZE

    def fails(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        shelf.write(Unit(False, 1), tmp_path / "1.npz", SIZE, fails)
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"]


def test_a_resume_cuts_the_records_back_but_for_steps_in_flight(tmp_path: Path) -> None:
    shelf = RecordShelf(tmp_path, 1e9)
    fill(shelf, range(1, 7))
    fill(shelf, range(7), validate=True)
    (tmp_path / "5.npz").write_bytes(b"x")
    (tmp_path / "5.npz.tmp").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("a user's own")
    shelf.cut_back(4, kept=frozenset({5}))
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    assert {path.name for path in tmp_path.glob("val-*")} == {f"val-{n}.jsonl" for n in range(5)}
    assert not list(tmp_path.glob("*.npz*")) and (tmp_path / "notes.txt").exists()


def test_a_new_run_sets_the_records_of_an_old_one_aside(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    for number in (1, 2):
        shelf = RecordShelf(folder, 1e9)
        shelf.set_aside()
        assert not steps_of(folder)
        fill(shelf, range(1, 3 + number))
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / str(number)).touch()
        (folder / "notes.txt").write_text("a user's own")
    assert steps_of(tmp_path / "episodes.old") == [1, 2, 3]
    assert [path.name for path in (tmp_path / "episodes.old/tokenizer").iterdir()] == ["1"]
    assert (folder / "notes.txt").exists()


def test_the_tokenizer_of_a_run_that_recorded_nothing_is_no_later_ones(tmp_path: Path) -> None:
    folder = tmp_path / "episodes"
    (folder / "tokenizer").mkdir(parents=True)
    RecordShelf(folder, 1e9).set_aside()
    assert not (folder / "tokenizer").exists()
    assert (tmp_path / "episodes.old/tokenizer").is_dir()
