"""Supervised training that fails is started again, and two ranks that learn beside a run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, own_environment, run_and_kill, steps_logged, tensors
from tests.e2e.test_training import read_steps
from tests.features.sft.runs.test_sft_runs import same_end, words, write_conversations


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_conversations(tmp_path_factory.mktemp("conversations") / "data.jsonl")


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def test_a_killed_supervised_run_is_started_again_and_ends_as_one_that_was_not(
    tiny_game: Path, data: Path, tmp_path: Path
) -> None:
    def argv_of(folder: Path) -> list[str]:
        told = words(tiny_game, folder, "sft.steps=30", "supervisor.max_restarts=2")
        return [sys.executable, str(PROJECT / "main.py"), *told, "--sft", str(data)]

    finish(argv_of(tmp_path / "whole"))
    run_dir = tmp_path / "broken/sft"
    process = subprocess.Popen(
        argv_of(tmp_path / "broken"), stderr=subprocess.PIPE, text=True, env=own_environment()
    )
    while process.poll() is None and steps_logged(run_dir) < 4:
        time.sleep(0.01)
    for attempt in children_of(process.pid):
        os.kill(attempt, signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "restart 1 of 2: the run failed (exit code 137" in errors
    same_end(tmp_path / "whole/sft", run_dir, 30, ("actor/model", "actor/optimizer"))
    assert (run_dir / "model/config.json").is_file()


def beside(game: Path, data: Path, folder: Path, ranks: int, *more: str) -> list[str]:
    """A run with every part that the gradient of given rows passes through."""
    told = words(
        game,
        folder,
        f"sft.files=[{data}]",
        "sft.loss_coef=0.5",
        "sft.batch_size=3",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.grad_clip=0.05",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
        "actor_rollout_ref.actor.optim.warmup_style=cosine",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        "trainer.total_training_steps=4",
        f"trainer.n_gpus_per_node={ranks}",
        *more,
    )
    return [sys.executable, str(PROJECT / "main.py"), *told]


@pytest.mark.slow
def test_two_ranks_learn_beside_a_run_what_one_does_and_a_kill_changes_nothing(
    tiny_game: Path, data: Path, tmp_path: Path
) -> None:
    runs = {}
    for name, ranks in (("one", 1), ("two", 2)):
        finish(beside(tiny_game, data, tmp_path / name, ranks))
        runs[name] = read_steps(tmp_path / name)[1:]
    for one, two in zip(runs["one"], runs["two"], strict=True):
        assert two["actor/sft_loss"] == pytest.approx(one["actor/sft_loss"], rel=1e-3)
        assert two["actor/lr"] == one["actor/lr"]
    # What was sampled first was sampled by equal weights.
    assert runs["two"][0]["actor/grad_norm"] == pytest.approx(
        runs["one"][0]["actor/grad_norm"], rel=1e-2
    )
    broken = beside(tiny_game, data, tmp_path / "broken", 2)
    run_and_kill(broken, tmp_path / "broken", random.Random(5))
    finish(broken)
    same_end(tmp_path / "two", tmp_path / "broken", 4, ("actor/model", "actor/optimizer"))
    assert all("lora" in name for name in tensors(tmp_path / "two/global_step_4/actor/model"))
