"""Folders that are written under another name first: killed, ended by a signal, or made twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_resume import listen_to_ctrl_c
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


WAITS = """
import sys, time
from pathlib import Path
from training.run.files import folder_in_the_making
SETTING_UP

def making(out):
    with folder_in_the_making(Path(out), ".incomplete") as folder:
        print("made", flush=True)
        time.sleep(60)

sys.exit(module.main(WORDS))
"""


def assert_a_signal_leaves_nothing(
    tmp_path: Path, setting_up: str, words: list[str], number: signal.Signals
) -> None:
    """Ends a command by a signal while it makes its folder; nothing of that is left.

    Args:
        setting_up: code that imports the command as `module`, and has it call `making(folder)`.
        words: what the command is called with; OUT stands for the folder that it makes.
    """
    (tmp_path / "places").mkdir()
    words = [str(tmp_path / "places/out") if word == "OUT" else word for word in words]
    code = WAITS.replace("SETTING_UP", setting_up).replace("WORDS", repr(words))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        text=True,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=listen_to_ctrl_c,
    )
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "Traceback" not in said, said
    assert names(tmp_path / "places") == []
