"""Commands by `python -m` work from a folder of one's own, whatever lies there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROJECT


def test_a_command_works_from_a_folder_of_ones_own_that_has_a_folder_data(tmp_path: Path) -> None:
    venv, own = tmp_path / "venv", tmp_path / "own"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin/python")
    (own / "data").mkdir(parents=True)
    (own / "setup.py").write_text("raise SystemExit('not this one')\n")
    command = [python, "-m", "data.names"]
    # PYTHONPATH would name the project without the script.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    assert subprocess.run(command, cwd=own, env=env, capture_output=True).returncode == 1
    subprocess.run([python, str(PROJECT / "scripts/name_project.py")], check=True)
    assert subprocess.run(command, cwd=own, env=env, capture_output=True).returncode == 0
    assert "name_project.py" in (PROJECT / "scripts/setup_env.sh").read_text()
