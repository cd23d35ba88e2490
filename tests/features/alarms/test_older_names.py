"""The alarms' older names go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.unit.test_features import run_python


@pytest.mark.seconds
def test_the_folder_that_git_leaves_behind_hides_no_moved_package(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for package in ("contrib", "custom", "data", "features", "training"):
        shutil.copytree(PROJECT / package, checkout / package)
    (checkout / "training/run/alarms/__pycache__").mkdir(parents=True, exist_ok=True)
    said = run_python(
        "import training.run.alarms as old\nimport features.alarms as new\nassert old is new, old",
        folder=checkout,
    )
    assert said == "training.run.alarms is called features.alarms now\n"
