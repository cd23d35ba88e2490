"""Tests the checks of data files and of folders to write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.needed_features import needs_features
from tests.unit.config.helpers import ROW, assert_refused, checked, load
from training.config import section
from training.config.leaves import leaves
from training.config.resources import files


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
            "this one in '.toml'; examples/prepare_gsm8k.py shows how rows are written; "
            "files of another form are read by data.custom_cls",
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


def test_a_misspelt_file_is_named_with_the_nearest_that_is_there(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games").mkdir()
    (tmp_path / "games/lift.py").touch()
    for given in ("games/lfit.py", "game/lift.py"):
        (problem,) = checked(runnable, f"custom_algorithm={given}")
        assert problem == (
            f"custom_algorithm={given} is not a file (seen from {tmp_path}); did you mean "
            "'games/lift.py'?"
        )
    absolute = f"custom_algorithm={tmp_path}/games/lfit.py"
    assert checked(runnable, absolute)[0].endswith(f"; did you mean '{tmp_path}/games/lift.py'?")


@pytest.mark.parametrize("key", ["data.train_files", "data.val_files"])
def test_the_task_files_of_an_environment_are_checked_with_all_else(
    key: str, runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    game = ["agent.environment.name=custom.envs.guess_number:GuessNumber"]
    assert checked(runnable, *game) == []
    (tmp_path / "tasks.jsonl").write_text("{}\n[]\n")
    problems = checked(runnable, *game, f"{key}=task.jsonl", "custom_algorithm=nowhere.py")
    assert (
        f"{key}=task.jsonl is not a file (seen from {tmp_path}); did you mean 'tasks.jsonl'?"
    ) in problems
    assert f"custom_algorithm=nowhere.py is not a file (seen from {tmp_path})" in problems
    (problem,) = checked(runnable, *game, f"{key}=tasks.jsonl")
    assert problem.startswith(f"{key}: tasks.jsonl line 2 holds '[]'")


@pytest.mark.parametrize(
    ("name", "key", "program"),
    [
        ("quickstart", "actor_rollout_ref.model.path", "prepare_quickstart"),
        ("tiny_prompts", "actor_rollout_ref.model.path", "prepare_tiny_prompts"),
        ("tiny_prompts", "data.train_files", "prepare_tiny_prompts"),
        ("smollm2_guess", "actor_rollout_ref.model.path", "prepare_smollm2"),
        ("smollm2_arithmetic", "data.val_files", "prepare_smollm2"),
        ("gsm8k_grpo", "data.train_files", "prepare_gsm8k"),
        ("qwen3_5_tools", "actor_rollout_ref.model.path", "prepare_zoo_game"),
        pytest.param(
            *("clues", "actor_rollout_ref.model.path", "prepare_clues"),
            marks=needs_features("context"),
        ),
        pytest.param(
            *("codes", "actor_rollout_ref.model.path", "prepare_codes"),
            marks=needs_features("teacher"),
        ),
    ],
)
@pytest.mark.parametrize("place", ["", "project/", "{folder}/"])
def test_what_an_example_makes_is_missing_with_its_command(
    name: str,
    key: str,
    program: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether the path is relative, in the project's folder or absolute."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(section, "PROJECT_ROOT", tmp_path / "project")
    monkeypatch.setattr(files, "PROJECT_ROOT", tmp_path / "project")
    loaded = load(str(PROJECT / "configs" / f"{name}.yaml"))
    (path,) = [leaf.value for known, leaf in leaves(loaded) if known == key]
    path = place.format(folder=tmp_path) + (path if isinstance(path, str) else path[0])
    problems = checked([str(PROJECT / "configs" / f"{name}.yaml")], f"{key}={path}")
    (problem,) = [text for text in problems if text.startswith(f"{key}={path}")]
    assert problem.endswith(f"; `python examples/{program}.py` makes it")
    elsewhere = [str(PROJECT / "configs" / f"{name}.yaml"), f"{key}=/no/such/place/file.parquet"]
    (problem,) = [text for text in checked(elsewhere) if text.startswith(f"{key}=/no")]
    assert "makes it" not in problem


def test_every_program_that_prepares_is_known_by_the_folder_that_it_writes() -> None:
    programs = {path.name: path.read_text() for path in PROJECT.glob("examples/prepare_*.py")}
    # It writes to the folder that a config names.
    del programs["prepare_game.py"]
    assert {f"examples/{name}" for name in programs} == set(files.PREPARED.values())
    for folder, program in files.PREPARED.items():
        assert f'Path("{folder}")' in programs[Path(program).name]
        assert program in (PROJECT / "README.md").read_text()


def test_rows_that_cannot_be_used_are_problems(runnable: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW | {"prompt": None}) + "\n")
    (problem,) = checked(runnable, f"data.train_files={file}")
    assert problem.startswith(
        f"data.train_files: 1 of 2 rows cannot be used: {file} row 1 has no prompt"
    )
    one_row = (f"data.train_files={file}", "data.train_max_samples=1", "data.train_batch_size=1")
    assert checked(runnable, *one_row) == []
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
