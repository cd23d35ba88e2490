"""Folders that are written under another name first: killed, ended by a signal, or made twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from features.viewer.build import _take_place
from tests.cases import fast_and_long
from tests.conftest import PROJECT
from training.run.files import folder_in_the_making

MAKES = """
import sys, time
from pathlib import Path
from training.run.files import folder_in_the_making
with folder_in_the_making(Path(sys.argv[1]), ".new") as folder:
    (folder / "half").touch()
    print("made", flush=True)
    time.sleep(60)
"""


def start_making(final: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", MAKES, str(final)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT)
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    return process


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def age(folder: Path) -> None:
    for path in folder.glob("*.new"):
        os.utime(path, (time.time() - 100, time.time() - 100))


def test_what_a_killed_process_left_is_removed_and_what_is_being_made_stays(tmp_path: Path) -> None:
    final = tmp_path / "viewer"
    lives = start_making(final)
    [living] = names(tmp_path)
    dies = start_making(final)
    dies.kill()
    dies.wait()
    assert len(names(tmp_path)) == 2
    others = ("viewer.new", "viewer.12345678.new.txt", "other.12345678.new")
    for name in others:
        (tmp_path / name).mkdir()
    age(tmp_path)
    try:
        with folder_in_the_making(final, ".new") as folder:
            assert names(tmp_path) == sorted([living, folder.name, *others])
            folder.rename(final)
        assert names(tmp_path) == sorted([living, "viewer", *others])
    finally:
        lives.kill()
        lives.wait()


def test_a_folder_that_is_not_renamed_is_removed(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="full"),
        folder_in_the_making(tmp_path / "a/b", ".new") as folder,
    ):
        (folder / "half").touch()
        raise OSError("the disk is full")
    assert names(tmp_path / "a") == []


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


WAITS = """
import sys, time
from pathlib import Path
if sys.argv[1] == "viewer":
    from features.viewer import command as module
    module.build_viewer = lambda runs, out, **options: making(out)
    words = [sys.argv[2], "--out", sys.argv[3]]
else:
    from features.export import export as module
    module.export = lambda checkpoint, out, **options: making(out)
    words = [sys.argv[2], sys.argv[3]]
from training.run.files import folder_in_the_making

def making(out):
    with folder_in_the_making(Path(out), ".incomplete") as folder:
        print("made", flush=True)
        time.sleep(60)

sys.exit(module.main(words))
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    "number",
    fast_and_long([signal.SIGTERM, signal.SIGHUP, signal.SIGINT], fast=[signal.SIGTERM]),
)
@pytest.mark.parametrize("what", ["viewer", "export"])
def test_a_signal_that_ends_a_viewer_or_an_export_leaves_nothing_half(
    tmp_path: Path, what: str, number: signal.Signals
) -> None:
    (tmp_path / "run/episodes").mkdir(parents=True)
    (tmp_path / "run/episodes/1.jsonl").touch()
    (tmp_path / "places").mkdir()
    words = [what, str(tmp_path / "run"), str(tmp_path / "places/out")]
    command = [sys.executable, "-c", WAITS, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=PROJECT, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert names(tmp_path / "places") == []
