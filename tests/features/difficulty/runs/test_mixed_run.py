"""configs/mixed.yaml with a model that is made for it, and the script that makes the table."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from mixed_game import TASKS, Mixed, task_of
from prepare_mixed import prepare, warm_up
from prepare_tiny_prompts import make_model, make_tokenizer

from main import run
from scripts import difficulty_table
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps
from training.run.signals import EndingSignals


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "made"
    prepare(folder, seed=0, steps=40)
    return folder / "model"


def test_the_game_pays_as_it_says() -> None:
    assert Counter(task.kind for task in TASKS) == {"apt": 55, "easy": 30, "impossible": 165}
    game = Mixed()
    for seed, task in enumerate(TASKS):
        paid = {}
        for number in range(12):
            assert game.reset(seed) == task.text
            _, paid[number], done, _ = game.step(f" {number} ")
            assert done
        between = set(range(task.above + 1, task.below))
        if task.kind == "impossible":
            assert not any(paid.values())
        else:
            assert {number for number, reward in paid.items() if reward} == between
            assert max(paid.values()) == 1.0
        assert game.reset(seed) and game.step("higher")[1] == 0.0
    assert task_of(250) == TASKS[0]


def test_a_warm_up_is_the_same_under_one_seed() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        made = make_model(tokenizer)
        warm_up(made, tokenizer, random.Random(0), steps=2)
        states.append(made.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_config_trains(model: Path, tmp_path: Path) -> None:
    argv = [
        str(PROJECT / "configs/mixed.yaml"),
        f"agent.environment.path={PROJECT}/examples/mixed_game.py",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=2",
        "agent.val_length=20",
        "trainer.logger=[file]",
    ]
    assert run(argv, EndingSignals()) == 0
    steps = read_steps(tmp_path)[1:]
    groups = round(sum(250 - step["difficulty/pool/new"] for step in steps[-1:]))
    assert 0 < groups <= 2 * 16


def test_the_table_is_made_of_runs_that_are_gone_on_with(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"actor_rollout_ref.model.path={model}", f"--out={tmp_path}", "--seeds", "1"]
    words = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *words]
    assert difficulty_table.main([*words, "--steps=2", "--ways", "difficulty"]) == 0
    [_, _, row] = capsys.readouterr().out.splitlines()[1:]
    folder = tmp_path / "difficulty-1"
    last = read_steps(folder)[-1]
    assert last["step"] == 2 and f"{last['mine/sampled_tokens']:,.0f}" in row
    assert difficulty_table.main([*words, "--steps=2", "--ways", "difficulty"]) == 0
    assert "exit code" not in capsys.readouterr().out, "a run that has ended is not made again"
    assert difficulty_table.main([*words, "--steps=3", "--ways", "difficulty"]) == 0
    further = read_steps(folder)[-1]
    assert further["step"] == 3
    assert further["mine/sampled_tokens"] > last["mine/sampled_tokens"]


def test_tokens_are_counted_once_with_filtered_groups(model: Path, tmp_path: Path) -> None:
    words = [f"actor_rollout_ref.model.path={model}", "data.train_batch_size=4"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", f"--out={tmp_path}", "--steps=2"]
    words += ["--seeds", "1", "--ways", "difficulty with filter_groups"]
    assert difficulty_table.main(words) == 0
    steps = read_steps(tmp_path / "difficulty-with-filter_groups-1")[1:]
    answers = sum(step["agent/episodes"] for step in steps)
    # Most answers are a word and the end of the turn, and none is longer.
    assert 1.5 * answers < steps[-1]["mine/sampled_tokens"] <= 2 * answers
