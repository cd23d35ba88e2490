"""Tests the checks of trackers: their packages, and the Python that they run in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.unit.config.helpers import ROLLOUT, checked, load


def test_packages_that_are_missing_are_named_with_the_way_out(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    another_python = (
        "; where that would change other packages install it into another Python and name that one "
        "in trackers.python"
    )
    found = checked(runnable, f"{ROLLOUT}.name=vllm", "trainer.logger=[wandb,tensorboard]")
    assert [text for text in found if text.startswith("trainer.logger")] == [
        "trainer.logger has wandb tensorboard, which is not installed: `pip install wandb "
        "tensorboard`, or take it out" + another_python
    ]
    assert checked(runnable, "trainer.logger=[wandb]") == [
        "trainer.logger has wandb, which is not installed: `pip install wandb`, or take it out"
        + another_python
    ]


def test_a_tracker_whose_package_is_missing_is_a_problem(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("wandb", "swanlab") else there(name),
    )
    assert checked(runnable, "trainer.logger=[console,json,file,tensorboard]") == []
    (problem,) = checked(runnable, "trainer.logger=[console,wandb,swanlab]")
    assert problem.startswith(
        "trainer.logger has wandb swanlab, which is not installed: `pip install wandb swanlab`, or "
        "take it out"
    )


def test_another_python_is_asked_for_the_trackers_packages(
    runnable: list[str], tmp_path: Path
) -> None:
    # A Python with the standard library alone.
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    wandb = ("trainer.logger=[file,wandb]", f"trackers.python={bare}")
    (problem,) = checked(runnable, *wandb)
    assert f"`{bare} -m pip install wandb`" in problem
    # What stays in the run's own Python is not asked for there.
    assert checked(runnable, "trainer.logger=[file,tensorboard]", wandb[1]) == []
    gone = checked(runnable, wandb[0], "trackers.python=/no/python")
    assert len(gone) == 1 and "trackers.python=/no/python does not run" in gone[0]


@pytest.mark.parametrize("name", ["agent", "quickstart", "test_config"])
def test_the_loggers_of_a_shipped_config_are_there(name: str, runnable: list[str]) -> None:
    logger = load(str(PROJECT / f"configs/{name}.yaml")).trainer.logger
    assert len(logger) > 1
    assert checked(runnable, f"trainer.logger=[{','.join(logger)}]") == []
