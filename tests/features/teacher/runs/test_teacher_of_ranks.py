"""Whole runs with a teacher through Ray: an average on two ranks that is killed, and async."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, run_and_kill, tensors
from tests.e2e.test_training import read_steps
from tests.features.teacher.runs.test_teacher_runs import STEPS, words
from tests.features.teacher.runs.test_teacher_runs import codes as codes

EMA = ("teacher.model=ema", "teacher.ema_decay=0.9")


def command(codes: Path, run_dir: Path, *more: str) -> list[str]:
    return [sys.executable, str(PROJECT / "main.py"), *words(codes, run_dir, *more)]


@pytest.mark.slow
def test_two_ranks_that_are_killed_go_on_with_the_same_average_bitwise(
    codes: Path, tmp_path: Path
) -> None:
    more = (*EMA, "trainer.n_gpus_per_node=2", "teacher.loss=top_k", "teacher.top_k=4")
    finish(command(codes, tmp_path / "whole", *more))
    broken = command(codes, tmp_path / "broken", *more)
    run_and_kill(broken, tmp_path / "broken", random.Random(7))
    finish(broken)
    for part in ("actor/model", "actor/optimizer", "actor/beside/teacher"):
        whole, other = (
            tensors(tmp_path / name / f"global_step_{STEPS}" / part) for name in ("whole", "broken")
        )
        assert whole and whole.keys() == other.keys()
        assert all(torch.equal(whole[name], other[name]) for name in whole), part


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["top_k", "advantage"])
def test_rows_that_were_played_ahead_are_taught(codes: Path, tmp_path: Path, loss: str) -> None:
    more = (
        *EMA,
        f"teacher.loss={loss}",
        "trainer.deterministic=false",
        "trainer.rollout_n_gpus=1",
        "trainer.async_level=1",
    )
    finish(command(codes, tmp_path, *more))
    steps = [step for step in read_steps(tmp_path) if step["step"] > 0]
    assert len(steps) == STEPS
    for step in steps:
        assert step["teacher/rows"] == 1.0 and step["teacher/prompt_tokens/max"] == 10
        assert ("actor/teacher_loss" in step) == (loss == "top_k")
    assert tensors(tmp_path / f"global_step_{STEPS}/actor/beside/teacher")
