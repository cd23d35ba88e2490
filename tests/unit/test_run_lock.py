"""Whether a folder is held: by this process, by another, by none; asking never gives a lock up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from training.config.loader import ConfigError
from training.run.run_lock import is_held, run_lock

HOLDER = """
import sys
from pathlib import Path
from training.run.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.seconds
def test_a_folder_that_another_process_holds_is_held_until_that_is_killed(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=PROJECT, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_held(tmp_path) and is_held(tmp_path)
        # Asking has not taken the lock away from it.
        with pytest.raises(ConfigError, match="is held by"), run_lock(tmp_path):
            pass
        holder.kill()
    assert not is_held(tmp_path)
    assert (tmp_path / "owner.json").stat().st_size > 0


@pytest.mark.seconds
def test_asking_about_ones_own_folder_does_not_let_others_in(tmp_path: Path) -> None:
    with run_lock(tmp_path):
        assert is_held(tmp_path) and is_held(tmp_path / "." / "")
        other = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)],
            cwd=PROJECT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert "is held by" in other.stderr and "held\n" not in other.stdout
    assert not is_held(tmp_path)
