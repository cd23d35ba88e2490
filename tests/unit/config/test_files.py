"""Tests the checks of data files and of folders to write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.config.helpers import ROW, assert_refused, checked


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/step"],
            "trainer.resume_from_path=/no/step is not a folder",
        ),
        (
            ["data.val_files=[]", "trainer.val_only=true"],
            "trainer.val_only has nothing to validate on: set data.val_files",
        ),
        (
            ["data.val_files=[]", "trainer.test_freq=5"],
            "trainer.test_freq has nothing to validate on: set data.val_files",
        ),
        (
            ["data.train_files={model}/config.toml"],
            "data.train_files: {model}/config.toml: a data file ends in .parquet, .json, .jsonl; "
            "this one in '.toml'; files of another form are read by data.custom_cls",
        ),
        (
            ["data.train_files=[]"],
            "data.train_files is missing: give a parquet, json or jsonl file, or a list of them; "
            "or something to act in, agent.environment.name",
        ),
    ],
)
def test_a_lack_of_data_is_refused(overrides: list[str], problem: str, runnable: list[str]) -> None:
    assert_refused(runnable, overrides, problem)


@pytest.mark.parametrize(
    "key",
    [
        "data.train_files",
        "data.val_files",
        "custom_reward_function.path",
        "custom_algorithm",
        "data.sampler.class_path",
    ],
)
def test_a_missing_file_is_named(
    key: str, runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{key}=nowhere.py is not a file (seen from {tmp_path})" in checked(
        runnable, f"{key}=nowhere.py"
    )


def test_rows_that_cannot_be_used_are_problems(runnable: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"prompt": None}) + "\n")
    (problem,) = checked(runnable, f"data.train_files={file}")
    assert problem.startswith(
        f"data.train_files: 1 of 2 rows cannot be used: {file} row 1 has no prompt"
    )
    assert checked(runnable, f"data.train_files={file}", "data.train_max_samples=1") == []
    (problem,) = checked(runnable, "data.prompt_key=question", "data.val_files=[]")
    assert "has no prompt (a string or chat messages) under 'question'" in problem
    file.write_text("{\n")
    (problem,) = checked(runnable, f"data.val_files={file}")
    assert problem.startswith(f"data.val_files: {file} line 1")


def test_a_class_of_ones_own_reads_data_of_any_kind(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.csv").touch()
    (tmp_path / "mine.py").write_text("class Mine:\n    pass\n")
    csv = f"data.train_files={tmp_path / 'rows.csv'}"
    assert len(checked(runnable, csv)) == 1
    assert (
        checked(
            runnable,
            csv,
            f"data.custom_cls.path={tmp_path / 'mine.py'}",
            "data.custom_cls.name=Mine",
        )
        == []
    )


def test_the_runs_folder_can_be_made(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.jsonl"
    for path in (file, file / "run"):
        assert checked(runnable, f"trainer.default_local_dir={path}") == [
            f"trainer.default_local_dir={path}: {file} is not a folder that can be written; name "
            "another folder"
        ]
    # Root may write anywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    inner = f"trainer.default_local_dir={tmp_path / 'a/b'}"
    assert checked(runnable, inner) == [
        f"{inner}: {tmp_path} is not a folder that can be written; name another folder"
    ]
    monkeypatch.chdir(tmp_path)
    (problem,) = checked(runnable, "trainer.default_local_dir=null")
    assert problem.startswith(
        "trainer.default_local_dir=null, so the run's folder=checkpoints/ppo_core/default: "
    )


def test_a_folder_for_episodes_that_cannot_be_written_is_named(runnable: list[str]) -> None:
    game = ["agent.environment.name=gymnasium:FrozenLake-v1", "agent.episodes_dir=/dev/null/x"]
    assert any(
        "agent.episodes_dir=/dev/null/x: /dev/null is not a folder that" in text
        for text in checked(runnable, *game)
    )
