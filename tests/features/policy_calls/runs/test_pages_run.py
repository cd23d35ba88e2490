"""configs/pages.yaml with a model that is made for it, and the game of the page."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from prepare_pages import make_tokenizer, prepare, warm_up
from prepare_tiny_prompts import make_model

from features.records.episode_files import read_episodes
from main import run
from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps
from training.run.signals import EndingSignals

SHORT = (
    "agent.val_length=8",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.total_training_steps=2",
    "trainer.test_freq=-1",
    "trainer.logger=[file]",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages") / "made"
    prepare(folder, seed=0, steps=60)
    return folder / "model"


def play(model: Path, run_dir: Path, *more: str) -> None:
    argv = [
        str(PROJECT / "configs/pages.yaml"),
        f"agent.environment.path={PROJECT}/examples/pages_game.py",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={run_dir}",
        *SHORT,
        *more,
    ]
    assert run(argv, EndingSignals()) == 0


def test_a_warm_up_is_the_same_under_one_seed() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        tokenizer = make_tokenizer()
        made = make_model(tokenizer)
        warm_up(made, tokenizer, random.Random(0), steps=2)
        models.append(made.state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("credit", ["episode", "own", "none"])
def test_the_config_trains_with_readers(model: Path, tmp_path: Path, credit: str) -> None:
    play(model, tmp_path, f"agent.environment.kwargs.credit={credit}")
    steps = read_steps(tmp_path)[1:]
    assert len(steps) == 2
    assert all(step["policy_calls/per_episode/mean"] == 4 for step in steps)
    assert all(step["policy_calls/refused"] == 0 for step in steps)
    paid = 4 * 16 if credit == "own" else 0
    assert all(step["policy_calls/paid"] == paid for step in steps)


def test_the_game_of_the_page_plays(model: Path, tmp_path: Path) -> None:
    page = (PROJECT / "features/policy_calls/README.md").read_text()
    (code,) = re.findall(r"```python\n# mine.py\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(code)
    game = (f"agent.environment.path={tmp_path}/mine.py", "agent.environment.cls=Checked")
    play(model, tmp_path / "run", *game, "trainer.total_training_steps=1")
    episodes = read_episodes(tmp_path / "run/episodes/1.jsonl")
    assert all(episode["turns"][1]["writes"] == "critic" for episode in episodes)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_answers(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    play(model, tmp_path, "actor_rollout_ref.rollout.name=vllm")
    assert all(step["policy_calls/per_episode/mean"] == 4 for step in read_steps(tmp_path)[1:])
