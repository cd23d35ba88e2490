"""The viewer's folder takes an old one's place whole, and is never left half."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from features.viewer.build import _take_place
from features.viewer.command import own_folder
from features.viewer.records import read_lines
from tests.cases import fast_and_long
from tests.unit.test_folders_in_the_making import assert_a_signal_leaves_nothing, names
from tests.unit.test_strange_folders import HOLES


def test_a_new_viewer_takes_an_old_one_s_place_whole(tmp_path: Path) -> None:
    out, new = tmp_path / "viewer", tmp_path / "viewer.new"
    for folder, text in ((out, "old"), (new, "new")):
        folder.mkdir()
        (folder / "index.html").write_text(text)
    _take_place(new, out)
    assert names(tmp_path) == ["viewer"] and (out / "index.html").read_text() == "new"
    with pytest.raises(OSError, match="No such file"):
        _take_place(tmp_path / "missing", out)
    assert names(tmp_path) == ["viewer"] and (out / "index.html").read_text() == "new"


SETTING_UP = """
from features.viewer import command as module
module.build_viewer = lambda runs, out, **options: making(out)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    "number",
    fast_and_long([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], fast=[signal.SIGTERM]),
)
def test_a_signal_that_ends_a_viewer_leaves_nothing_half(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "run/episodes").mkdir(parents=True)
    (tmp_path / "run/episodes/1.jsonl").touch()
    words = [str(tmp_path / "run"), "--out", "OUT"]
    assert_a_signal_leaves_nothing(tmp_path, SETTING_UP, words, number)


def test_a_viewer_stays_in_the_run_s_folder(tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    assert own_folder(run_dir) == run_dir / "viewer"
    (run_dir / "viewer").symlink_to(elsewhere / "new")
    with pytest.raises(ValueError, match="outside of the run's folder"):
        own_folder(run_dir)
    # The run's folder itself may be a link.
    (tmp_path / "link").symlink_to(elsewhere)
    assert own_folder(tmp_path / "link") == tmp_path / "link/viewer"


@pytest.mark.seconds
def test_a_record_that_is_one_endless_line_is_refused_at_once(tmp_path: Path) -> None:
    with (tmp_path / "1.jsonl").open("wb") as file:
        file.truncate(HOLES)
    with pytest.raises(OSError, match="has a line of more than 256 MiB"):
        list(read_lines(tmp_path / "1.jsonl"))
