"""What the features that are there do beside each other, and each alone."""

from __future__ import annotations

import pytest

from tests.needed_features import absent_folders
from tests.unit.test_features import run_python
from tests.unit.test_observers import make_run
from training.features import features
from training.observers_of_run import open_observers

# In this order they are told: what a later one reads an earlier one has left.
IN_ORDER = ("alarms", "context", "records", "trackers", "viewer", "run_page")
WITH_SETTINGS = [name for name, feature in features().items() if feature.section is not None]


def test_the_features_observers_are_told_in_their_order() -> None:
    loggers = "[console]" if absent_folders("trackers") else "[console,file]"
    there = [name for name in IN_ORDER if not absent_folders(name)]
    observers = open_observers(make_run(f"trainer.logger={loggers}"))
    assert list(observers.named) == ["console", *there]


@pytest.mark.seconds
@pytest.mark.parametrize("first", ["settings", "feature"])
@pytest.mark.parametrize("name", WITH_SETTINGS)
def test_a_features_own_modules_can_be_imported_first(name: str, first: str) -> None:
    module = f"features.{name}.{first}"
    assert run_python(f"import {module}; from training.config import PPOConfig; PPOConfig()") == ""
