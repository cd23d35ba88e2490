"""Runs whose environments are not what they should be, end to end.

They stop, say why, and leave what they should.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import main
from tests.conftest import PROJECT
from tests.e2e.test_agents import AGENT, GAMES, GRPO, fit, game_config, playing
from tests.e2e.test_training import read_steps
from training.building import build_trainer
from training.config.loader import ConfigError
from training.config.reference import to_yaml
from training.run.abort_policy import EnvironmentsFail
from training.run.checkpoint_contents import load_driver_state
from training.run.exit_codes import MEND
from training.run.signals import ENDING_SIGNALS, set_handlers

STEPS = "trainer.total_training_steps=25"


def run(config_file: Path) -> int:
    """As `python main.py` would end."""
    try:
        return main.main([str(config_file)])
    finally:
        set_handlers(dict.fromkeys(ENDING_SIGNALS, signal.SIG_DFL))


def write(config: object, folder: Path) -> Path:
    file = folder / "own.yaml"
    file.write_text(to_yaml(config))  # type: ignore[arg-type]
    return file


def test_an_environment_whose_step_always_raises_keeps_the_run_from_beginning(
    tiny_game, tmp_path, capsys
) -> None:
    code = run(write(game_config(tiny_game, tmp_path / "run", STEPS, *playing("Doomed")), tmp_path))
    said = capsys.readouterr().err
    assert code == 2
    problem = f"environment {GAMES}:Doomed crashed in all 16 trial"
    assert f"1 problem in the configuration:\n  - {problem}" in said
    assert "RuntimeError: never" in said and not (tmp_path / "run/metrics.jsonl").exists()


def test_one_that_begins_to_fail_stops_the_run_after_three_steps(
    tiny_game, tmp_path, capsys
) -> None:
    config = game_config(
        tiny_game, tmp_path / "run", STEPS, *playing("Doomed"), "agent.trial_episodes=0"
    )
    code = run(write(config, tmp_path))
    said = capsys.readouterr().err
    assert code == MEND and "RuntimeError: never" in said
    assert (
        "96 of 96 attempts of the last three steps failed, above agent.max_failure_rate=0.5" in said
    )
    assert len(read_steps(tmp_path / "run")) == 2


def test_all_environments_that_cannot_be_built_are_listed_with_their_names(
    tiny_game, tmp_path
) -> None:
    entries = (
        f"env_template=[{{path: {GAMES}, cls: Nobody}}, "
        f"{{path: {GAMES}, cls: Doomed, kwargs: {{other: 1}}}}]"
    )
    with pytest.raises(ConfigError) as raised:
        game_config(tiny_game, tmp_path / "run", f"~{AGENT}.path", f"~{AGENT}.cls", entries)
    said = str(raised.value)
    assert "2 problems in the configuration:" in said
    assert "does not define 'Nobody'" in said and "env_template[1].kwargs: Doomed takes" in said


def test_a_group_whose_members_get_different_tasks_stops_the_run_unless_that_is_meant(
    tiny_game, tmp_path
) -> None:
    own = (*GRPO, *playing("Drawn"), "data.max_prompt_length=64", "agent.trial_episodes=0")
    with pytest.raises(
        EnvironmentsFail, match="environment Drawn: in 8 of 8 groups the members began differently"
    ):
        fit(game_config(tiny_game, tmp_path / "a", *own))
    fit(game_config(tiny_game, tmp_path / "b", *own, "agent.allow_different_tasks=true"))
    assert len(read_steps(tmp_path / "b")) == 2


def test_a_run_writes_where_it_was_told_to_though_an_environment_changes_the_folder(
    tiny_game, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = game_config(tiny_game, Path("run"), *playing("Wanderer"), "records.folder=episodes")
    fit(config)
    assert os.getcwd() == "/"
    assert len(read_steps(tmp_path / "run")) == 2 and (tmp_path / "episodes/2.jsonl").exists()


def test_a_suite_of_ones_own_changes_the_weights_and_a_checkpoint_keeps_them(
    tiny_game, tmp_path
) -> None:
    entries = (
        f"env_template=[{{path: {GAMES}, cls: Shell, max_turn: 2}}, "
        f"{{path: {GAMES}, cls: Fragile, weight: 3}}]"
    )
    own = f"agent.suite={{path: {PROJECT / 'examples/curriculum.py'}, name: SuccessCurriculum}}"
    taken_back = (f"~{AGENT}.path", f"~{AGENT}.cls")
    trainer, _ = fit(
        game_config(tiny_game, tmp_path, *taken_back, entries, own, "trainer.save_freq=1")
    )
    steps = read_steps(tmp_path)
    assert [steps[0][f"env/{name}/episodes"] for name in ("Shell", "Fragile")] == [2, 6]
    # It would last three.
    assert steps[0]["env/Shell/turns"] == 2
    assert steps[0]["env/Shell/weight"] == 1 and trainer.suite.weights != [1.0, 3.0]
    assert load_driver_state(tmp_path / "global_step_2").suite["success"] == trainer.suite.success
    resumed = build_trainer(game_config(tiny_game, tmp_path, *taken_back, entries, own))
    resumed.init_workers()
    resumed.load_checkpoint()
    resumed.shutdown()
    assert resumed.suite.weights == trainer.suite.weights


def test_validation_alone_leaves_the_config_that_its_episodes_are_replayed_with(
    tiny_game, tmp_path
) -> None:
    only = ("trainer.val_only=true", "agent.val_length=4", *playing("Fragile"))
    first = game_config(tiny_game, tmp_path / "run", *only)
    assert run(write(first, tmp_path)) == 0
    kept = (tmp_path / "run/config.yaml").read_text()
    assert kept == to_yaml(first)
    assert (
        run(write(game_config(tiny_game, tmp_path / "run", *only, "agent.max_turn=3"), tmp_path))
        == 0
    )
    assert (tmp_path / "run/config.yaml").read_text() == kept
    assert "max_turn: 3" in (tmp_path / "run/config.validation.yaml").read_text()
