"""The court as a command, over a game whose true credit is enumerated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from main import run
from tests.conftest import PROJECT
from tests.features.branching.runs.test_branching_runs import words
from training.run.signals import EndingSignals

PLANTED = PROJECT / "tests/features/branching/planted.py"
RIGHT = ("planted", "twice", "grpo", "turn_return")
WRONG = ("other_episode", "shuffled", "shifted", "sign")


@pytest.mark.slow
def test_the_command_finds_the_true_credit_and_puts_faults_last(
    tiny_game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_MODEL", f"{tiny_game}/model")
    argv = [
        *words(tiny_game, tmp_path, cls="Hidden"),
        f"agent.environment.path={PLANTED}",
        f"custom_algorithm={PLANTED}",
        "agent.max_turn=3",
        "agent.max_turn_tokens=1",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.rollout.n=4",
        "--judge-credit",
        f"{tiny_game}/model",
        *("--episodes", "512", "--samples", "8", "--estimators", ",".join((*RIGHT, *WRONG))),
    ]
    assert run(argv, EndingSignals()) == 0
    result = json.loads((tmp_path / "credit/model/credit.json").read_text())
    assert not result["failed"] and not result["left_out"]
    print(json.dumps(result["estimators"], indent=1))
    numbers = {
        name: {key: [float(each) for each in values] for key, values in told.items()}
        for name, told in result["estimators"].items()
    }
    r, low, high = numbers["planted"]["r"]
    assert r >= 0.97 and low < 1 < high
    slope, low, high = numbers["planted"]["slope"]
    assert 0.95 <= slope <= 1.05 and low < 1 < high
    assert numbers["twice"]["r"] == pytest.approx(numbers["planted"]["r"], abs=1e-3)
    assert numbers["twice"]["slope"][0] == pytest.approx(2 * slope, abs=1e-2)
    _, low, high = numbers["shuffled"]["r"]
    assert low < 0 < high
    # In the order of the table, the best first.
    assert set(list(numbers)[-4:]) == set(WRONG) and list(numbers)[-1] == "sign"
    assert set(list(numbers)[:2]) == {"planted", "twice"}
