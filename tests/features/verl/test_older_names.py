"""The older names of verl's modules go on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import PROJECT
from tests.unit.test_features import run_python


def test_python_m_runs_an_older_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "training.config.verl_keys"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0
    assert done.stderr == "training.config.verl_keys is called features.verl.verl_keys now\n"


@pytest.mark.seconds
def test_an_older_package_is_said_once() -> None:
    said = run_python("import contrib.verl.utils, contrib.verl")
    assert said == "contrib.verl is called features.verl now\n"
