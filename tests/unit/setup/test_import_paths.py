"""How a saved config names environments, reward functions and datasets."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from custom.envs import simple_game
from custom.envs.simple_game import SimpleGameEnvironment
from custom.reward_score import default_compute_score
from setup import ConfigStore, RayPPOTrainer
from setup.import_paths import import_paths

GAME_FILE = str(simple_game.__file__)


@pytest.mark.parametrize("environment", [SimpleGameEnvironment, SimpleGameEnvironment()])
def test_an_environment_is_named_by_its_class_and_file(environment: object) -> None:
    named = import_paths({"environment": environment})["environment"]
    assert named.settings == {
        "agent.environment.path": GAME_FILE,
        "agent.environment.cls": "SimpleGameEnvironment",
    }
    assert not named.missing


def test_a_reward_function_is_named_and_an_object_that_is_called_is_not() -> None:
    named = import_paths({"reward_fn": default_compute_score})["reward_fn"]
    assert named.settings["custom_reward_function.name"] == "default_compute_score"
    assert Path(named.settings["custom_reward_function.path"]).parts[-1] != "given"
    assert not named.missing
    instance = partial(default_compute_score)
    unnamed = import_paths({"reward_fn": instance})["reward_fn"]
    assert unnamed.settings["custom_reward_function.path"] == "given"
    assert unnamed.missing == "partial of functools"


def test_rows_in_a_list_are_saved_as_to_be_supplied(tmp_path: Path) -> None:
    config = ConfigStore()
    config.model.model_name = "a/model"
    RayPPOTrainer(config, reward_fn=default_compute_score, dataset=["3 5"])
    config.save(tmp_path / "saved.yaml")
    first = (tmp_path / "saved.yaml").read_text().splitlines()[0]
    assert first == "# dataset has no import path, and must be supplied: list of builtins"
