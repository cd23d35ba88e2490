"""examples/integration as its reader has it.

A folder elsewhere, with a model of its own, run in both ways.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, with its model."""
    folder = tmp_path_factory.mktemp("elsewhere") / "warehouse"
    shutil.copytree(
        PROJECT / "examples/integration", folder, ignore=shutil.ignore_patterns("__pycache__")
    )
    python(folder, "make_model.py")
    return folder


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.mark.long
def test_a_project_elsewhere_learns_with_its_own_parts(project: Path) -> None:
    python(project, str(PROJECT / "main.py"), "train.yaml", "trainer.total_training_steps=20")
    steps = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]
    assert len(rewards) == 20 and sum(rewards[:4]) / 4 < 0.3 and sum(rewards[-4:]) / 4 > 0.7
    assert steps[-1]["tool/stock/calls"] > 0 and steps[-1]["agent/ending/done"] == 128


@pytest.mark.long
def test_the_program_of_the_example_trains(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", ["train.py", "trainer.total_training_steps=1"])
    # In this process: the imports are most of a program's time.
    runpy.run_path("train.py", run_name="__main__")
    assert "calls of the tool" in capsys.readouterr().out
    assert (project / "run_python/metrics.jsonl").is_file()
