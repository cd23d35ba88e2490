"""configs/errands.yaml with a model that is made for it."""

from __future__ import annotations

from pathlib import Path

from prepare_game import prepare

from main import run
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps
from training.config.loader import load_config
from training.run.signals import EndingSignals


def test_the_config_trains_a_model_that_is_made_for_it(tmp_path: Path) -> None:
    argv = [
        str(PROJECT / "configs/errands.yaml"),
        f"agent.environment.path={PROJECT}/examples/errands_game.py",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "agent.val_length=8",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.logger=[file]",
    ]
    prepare(load_config(argv, check=False).config, games=300, steps=150)
    assert run(argv, EndingSignals()) == 0
    steps = read_steps(tmp_path / "run")[1:]
    assert len(steps) == 2
    assert all(step["agent/episodes"] == 16 for step in steps)
    # A model that writes boxes and doors plays all ten turns.
    assert all(step["agent/turns/mean"] == 10 for step in steps)
    assert all(0 <= step["agent/info/won/mean"] <= 1 for step in steps)
