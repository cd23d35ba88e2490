"""A viewer that is added to has the bytes of one that is made at once, and costs what is new."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from features.viewer import build, kept_state, parts
from features.viewer.build import RecordedRun, build_viewer
from features.viewer.command import main
from features.viewer.data_files import DataFolder
from features.viewer.kept_state import count_settled
from features.viewer.records import RecordFile, list_files
from tests.made_episodes import Made, make_run
from tests.viewer_data import listed, manifest, page_of, pages

SMALL = {"groups": 2, "members": 2, "tokens": 20, "turns": 2, "words": 60}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records 24 steps, and validations of three of them."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    episodes = make_run(folder, Made(steps=24, **SMALL))
    for step in (0, 10, 20):
        shutil.copy2(episodes / f"{step + 1}.jsonl", episodes / f"val-{step}.jsonl")
    return folder


def reach(recorded: Path, run: Path, step: int) -> None:
    """Copies what a run has recorded up to a step into its folder."""
    (run / "episodes").mkdir(parents=True, exist_ok=True)
    shutil.copytree(recorded / "episodes/tokenizer", run / "episodes/tokenizer", dirs_exist_ok=True)
    for file in list_files(recorded / "episodes"):
        if file.step <= step and not (run / "episodes" / file.path.name).exists():
            shutil.copy2(file.path, run / "episodes")
            if file.kind == "train":
                shutil.copy2(file.update_path, run / "episodes")


def make(run: Path, out: Path, *, goes_on: bool) -> None:
    build_viewer(
        [RecordedRun(number=0, folder=run, episodes=run / "episodes")],
        out,
        goes_on=goes_on,
        shows_progress=False,
    )


def contents(viewer: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(viewer)): path.read_bytes()
        for path in sorted(viewer.rglob("*"))
        if path.is_file()
    }


def assert_whole(run: Path, out: Path, *, goes_on: bool) -> None:
    """Compares a viewer with one that is made at once, file by file."""
    anew = run.parent / "anew"
    make(run, anew, goes_on=goes_on)
    made, right = contents(out), contents(anew)
    shutil.rmtree(anew)
    if goes_on:
        # What the manifest before named stays until the next time.
        assert made.keys() >= right.keys()
        made = {name: made[name] for name in right}
        for told in (made, right):
            del told["data/state.json"]
    assert made == right


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lists the files of records that are read, in their order."""
    names: list[str] = []
    original = build.StepReader.__init__

    def noted(self: Any, file: RecordFile, update: Any) -> None:
        names.append(file.path.name)
        original(self, file, update)

    monkeypatch.setattr(build.StepReader, "__init__", noted)
    return names


@pytest.mark.seconds
@pytest.mark.parametrize("most_pairs", [1 << 26, 4000])
def test_a_viewer_that_is_added_to_has_the_bytes_of_one_made_at_once(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_pairs: int
) -> None:
    monkeypatch.setattr(parts, "MOST_PAIRS", most_pairs)
    monkeypatch.setattr("features.viewer.search_index.FILE_PAIRS", 500)
    run, out = tmp_path / "run", tmp_path / "run/viewer"
    for step in (1, 2, 3, 7, 8, 10, 11, 17, 21, 24):
        reach(recorded, run, step)
        make(run, out, goes_on=True)
        assert_whole(run, out, goes_on=True)
        rows = listed(out)
        assert manifest(out)["episodes"] == len(rows)
        assert all(page_of(out, row)[0]["id"] == row["id"] for row in rows)
    make(run, out, goes_on=False)
    assert_whole(run, out, goes_on=False)
    assert len(listed(out)) == 27 * 4


@pytest.mark.seconds
def test_a_rewrite_reads_the_new_steps_and_writes_as_much_after_many_as_after_few(
    recorded: Path, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    original = DataFolder.write

    def noted(self: DataFolder, name: str, *arguments: Any) -> None:
        written.append(name)
        original(self, name, *arguments)

    monkeypatch.setattr(DataFolder, "write", noted)
    run, out = tmp_path / "run", tmp_path / "run/viewer"
    counts = {}
    for step in range(1, 25):
        reach(recorded, run, step)
        opened.clear()
        written.clear()
        make(run, out, goes_on=True)
        counts[step] = len(written)
        # The newest step of the last time may have grown since.
        new = {f"{step}.jsonl", f"{step - 1}.jsonl", f"val-{step - 1}.jsonl", f"val-{step}.jsonl"}
        assert set(opened) <= new and f"{step}.jsonl" in opened
    early, late = [sum(counts[step] for step in range(at, at + 8)) for at in (3, 17)]
    assert late < 1.4 * early
    assert max(counts.values()) < 40


def change_nothing(run: Path) -> None:
    """Leaves all as it is."""


def remove_oldest(run: Path) -> None:
    for name in ("1.jsonl", "1.npz", "val-0.jsonl"):
        (run / "episodes" / name).unlink()


def go_back(run: Path) -> None:
    """Does what a run does that goes on from step 4: later records go, and step 5 is another."""
    for step in range(5, 9):
        for ending in ("jsonl", "npz"):
            (run / f"episodes/{step}.{ending}").unlink()
    shutil.copy2(run / "episodes/3.jsonl", run / "episodes/5.jsonl")


def change_version(run: Path) -> None:
    path = run / "viewer/data/state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": "of another one"}))


def break_state(run: Path) -> None:
    path = run / "viewer/data/state.json"
    path.write_bytes(path.read_bytes()[:100])


def turn_state(run: Path) -> None:
    """Writes JSON of another form."""
    path = run / "viewer/data/state.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "builder": {**told["builder"], "further": 1}}))


def remove_state(run: Path) -> None:
    (run / "viewer/data/state.json").unlink()


def remove_data(run: Path) -> None:
    shutil.rmtree(run / "viewer/data/list")


def touch_early(run: Path) -> None:
    """Writes an early step's columns anew."""
    os.utime(run / "episodes/2.npz")


def validate_late(run: Path) -> None:
    """Adds a validation of a step that has passed."""
    shutil.copy2(run / "episodes/3.jsonl", run / "episodes/val-3.jsonl")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("happens", "is_kept"),
    [
        (change_nothing, True),
        (remove_oldest, False),
        (go_back, False),
        (change_version, False),
        (break_state, False),
        (turn_state, False),
        (remove_state, False),
        (remove_data, False),
        (touch_early, False),
        (validate_late, False),
    ],
)
def test_a_viewer_that_does_not_fit_its_records_is_made_anew(
    recorded: Path,
    tmp_path: Path,
    opened: list[str],
    happens: Callable[[Path], None],
    is_kept: bool,
) -> None:
    run, out = tmp_path / "run", tmp_path / "run/viewer"
    reach(recorded, run, 8)
    make(run, out, goes_on=True)
    happens(run)
    opened.clear()
    make(run, out, goes_on=False)
    read = list(opened)
    assert (len(read) < 4) == is_kept and len(set(read)) == len(read)
    if not is_kept:
        assert sorted(read) == sorted(file.path.name for file in list_files(run / "episodes"))
    assert_whole(run, out, goes_on=False)


@pytest.mark.seconds
@pytest.mark.parametrize("files_written", [0, 1, 5, 11, 17])
def test_what_was_cut_off_while_it_was_added_to_is_shown_as_before_and_made_whole(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_written: int
) -> None:
    run, out = tmp_path / "run", tmp_path / "run/viewer"
    reach(recorded, run, 6)
    make(run, out, goes_on=True)
    before = pages(out)
    reach(recorded, run, 14)
    left = [files_written]
    original = DataFolder.write

    def cut_off(self: DataFolder, *arguments: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DataFolder, "write", cut_off)
        with pytest.raises(KeyboardInterrupt):
            make(run, out, goes_on=True)
    assert pages(out).keys() == before.keys()
    make(run, out, goes_on=False)
    assert_whole(run, out, goes_on=False)


@pytest.mark.seconds
def test_two_that_add_to_one_viewer_do_not_meet(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "run/viewer"
    reach(recorded, run, 4)
    make(run, out, goes_on=True)
    reach(recorded, run, 6)
    original = build.read_state
    inside: list[int] = []

    def meets_another(*arguments: Any) -> Any:
        if not inside:
            inside.append(1)
            # The other one finds it locked, makes its own, and puts that into the place.
            make(run, out, goes_on=True)
        return original(*arguments)

    monkeypatch.setattr(build, "read_state", meets_another)
    with pytest.raises(OSError, match="was replaced"):
        make(run, out, goes_on=True)
    assert_whole(run, out, goes_on=True)


@pytest.mark.seconds
def test_the_command_adds_to_a_viewer_and_takes_in_columns_that_came_late(
    recorded: Path, tmp_path: Path, opened: list[str]
) -> None:
    run = tmp_path / "run"
    reach(recorded, run, 9)
    (run / "episodes/8.npz").rename(tmp_path / "8.npz")
    assert main([str(run), "--goes-on"]) == 0
    (tmp_path / "8.npz").rename(run / "episodes/8.npz")
    opened.clear()
    assert main([str(run)]) == 0
    assert opened == ["8.jsonl", "9.jsonl"]
    (tmp_path / "anew").mkdir()
    assert_whole(run, run / "viewer", goes_on=False)


def test_the_newest_step_and_columns_to_come_are_not_settled(tmp_path: Path) -> None:
    def files(*names: str) -> list[RecordFile]:
        for name in names:
            (tmp_path / name).touch()
        return sorted(list_files(tmp_path), key=lambda file: (file.step, file.kind))

    assert count_settled([], goes_on=True) == 0
    assert count_settled(files("val-0.jsonl"), goes_on=True) == 0
    assert count_settled(files("1.jsonl"), goes_on=True) == 1
    several = files("2.jsonl", "val-2.jsonl", "3.jsonl", "1.npz", "2.npz")
    assert [file.path.name for file in several[3:]] == ["val-2.jsonl", "3.jsonl"]
    assert count_settled(several, goes_on=True) == 4
    assert count_settled(several, goes_on=False) == 5
    (tmp_path / "2.npz").unlink()
    assert count_settled(several, goes_on=True) == 2
    # A run without columns waits for none.
    (tmp_path / "1.npz").unlink()
    assert count_settled(several, goes_on=True) == 4
    assert kept_state.LATE_STEPS > 1
