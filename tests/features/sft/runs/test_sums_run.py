"""configs/sums.yaml with a model that is made for it: the episodes first, then the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from prepare_sums import prepare

from main import run
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps
from training.run.signals import EndingSignals


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums") / "made"
    prepare(folder, seed=0, steps=60)
    return folder


def play(made: Path, run_dir: Path, *more: str) -> None:
    argv = [
        str(PROJECT / "configs/sums.yaml"),
        f"agent.environment.path={PROJECT}/examples/sums_game.py",
        f"actor_rollout_ref.model.path={made}/model",
        f"sft.files=[{made}/scripted.jsonl]",
        f"sft.val_files=[{made}/held_out.jsonl]",
        f"sft.folder={run_dir}/sft",
        f"trainer.default_local_dir={run_dir}",
        "agent.val_length=64",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.logger=[file]",
        *more,
    ]
    assert run(argv, EndingSignals()) == 0


def test_twenty_episodes_make_a_game_that_is_never_won_one_that_sometimes_is(
    made: Path, tmp_path: Path
) -> None:
    play(made, tmp_path / "alone")
    assert reward_of(tmp_path / "alone") == 0.0
    play(made, tmp_path, "--sft")
    steps = read_steps(tmp_path / "sft")
    assert steps[-1]["actor/sft_loss"] < 0.2 < 1 < steps[1]["actor/sft_loss"]
    play(made, tmp_path / "first", f"actor_rollout_ref.model.path={tmp_path}/sft/model")
    assert reward_of(tmp_path / "first") > 0.03


def reward_of(run_dir: Path) -> float:
    """The reward of the validation before the first step."""
    record = read_steps(run_dir)[0]
    (reward,) = [record[name] for name in record if name.endswith("reward/mean@1")]
    return float(reward)
