"""The trial before a run names a model that the config lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from features.judges import ModelSettings, install_models, models
from tests.unit.test_trial import Marathon, trial_problems


@pytest.mark.parametrize("at", ["reset", "step"])
def test_a_model_that_the_config_lacks_is_named_before_the_environment_that_asks_it(
    at: str, tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Judged(Marathon):
        def reset(self, seed: int | None = None) -> Any:
            return models["judge"].ask("ready?") if at == "reset" else super().reset(seed)

        def step(self, action: str) -> tuple[Any, ...]:
            return models["judge"].ask(action), 1.0, True, {}

    other = ModelSettings(name="jugde", base_url="http://127.0.0.1:9/v1", model="m")
    install_models({"jugde": other})
    try:
        (problem,) = trial_problems(tiny_game, Judged, monkeypatch)
    finally:
        install_models({})
    assert problem.startswith(
        "judges.models has no 'judge'; it has: jugde. Did you mean 'jugde'? environment Judged"
    )
    assert "must answer" not in problem and problem.count("has no 'judge'") == 1
    assert "test_trial.py" in problem
