"""Loads configs and collects what is wrong with them, for the tests of the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.config import PPOConfig
from training.config.checks import check_config
from training.config.loader import ConfigError, load_config

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
ULYSSES = f"{ACTOR}.ulysses_sequence_parallel_size"
ROW = {"data_source": "mine", "prompt": "2 + 3?", "reward_model": {"ground_truth": "5"}}


def load(*argv: str) -> PPOConfig:
    """Returns the config of a command line, unchecked."""
    return load_config(list(argv), check=False).config


def problems_of(*argv: str) -> list[str]:
    """Returns what reading a command line finds wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(list(argv), check=False)
    return caught.value.problems


def checked(runnable: list[str], *more: str) -> list[str]:
    """Returns what reading finds wrong, or else what the checks do."""
    try:
        config = load(*runnable, *more)
    except ConfigError as error:
        return error.problems
    return check_config(config)


def assert_refused(runnable: list[str], overrides: list[str], problem: str) -> None:
    """Asserts that a runnable config with these overrides has a problem; {model} is its model."""
    model = runnable[0].split("=")[1]
    (Path(model) / "config.toml").touch()
    found = checked(runnable, *(text.replace("{model}", model) for text in overrides))
    assert problem.replace("{model}", model) in found


def warned(caplog: pytest.LogCaptureFixture, runnable: list[str], *more: str) -> list[str]:
    """Returns the warnings that the checks of a config without problems log."""
    caplog.clear()
    assert checked(runnable, *more) == []
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("training.config")
    ]
