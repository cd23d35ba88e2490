"""Runs and courts that are killed at random moments end as those that were not, and leave nothing.

Two ranks give the numbers of one.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.conftest import PROJECT
from tests.e2e.test_resume import finish, listen_to_ctrl_c, own_environment, tensors
from tests.e2e.test_training import read_steps
from tests.features.branching.runs.test_branching_runs import numbers_of, train, words

MAIN = [sys.executable, str(PROJECT / "main.py")]
STEPS = 3
VINE = ("algorithm.adv_estimator=vine", "branching.at=every", "branching.samples=2")
REDRAW = ("algorithm.adv_estimator=vine_redraw", "branching.at=random")
TREE = ("algorithm.adv_estimator=tree_grpo", "branching.at=[1]", "branching.samples=3")
SAVED = ("trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2")
# Of a process and all that it starts.
MARK = "BRANCHING_KILL"


class Killed:
    """Starts a command again and again, each time to be ended at a random moment."""

    def __init__(self, argv: list[str], seconds: float, seed: int) -> None:
        self.argv = argv
        self.seconds = seconds
        self.draw = random.Random(seed)
        self.mark = uuid.uuid4().hex

    def end_by(self, number: signal.Signals) -> int:
        """Starts it, sends the signal, and returns the exit code."""
        process = subprocess.Popen(
            self.argv,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=own_environment() | {MARK: self.mark},
            preexec_fn=listen_to_ctrl_c,
        )
        try:
            process.wait(self.draw.uniform(0.3, 1.0) * self.seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
        _, errors = process.communicate(timeout=300)
        # Behind a command's end a signal does as the system says.
        assert process.returncode in (0, -number, 128 + number), errors[-3000:]
        return process.returncode

    def left(self) -> list[str]:
        """Lists the command lines of the processes that it started and that still run."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if wanted in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text())
            except OSError:
                # It has ended, or is another's.
                continue
        return found

    def require_nothing_left(self) -> None:
        """Gives what it started a minute to end."""
        waits_until = time.monotonic() + 60
        while self.left() and time.monotonic() < waits_until:
            time.sleep(0.1)
        assert not self.left()


def timed(argv: list[str]) -> float:
    """Runs a command to its end; returns the seconds."""
    began_at = time.monotonic()
    finish(argv)
    return time.monotonic() - began_at


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (*VINE, "branching.state=snapshot"),
        (*VINE, "branching.state=replay", "agent.environment.isolation=process"),
        (*TREE, "branching.state=snapshot", "branching.luck=fresh"),
        (*TREE, "branching.state=replay"),
        (*REDRAW, "branching.state=copy"),
    ],
    ids=["vine snapshot", "vine replay", "tree snapshot", "tree replay", "redraw copy"],
)
def test_a_run_that_is_killed_again_and_again_ends_bitwise_like_one_that_was_not(
    more: tuple[str, ...], tiny_game: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    seconds = timed([*MAIN, *words(tiny_game, whole, *SAVED, *more, steps=STEPS)])
    argv = [*MAIN, *words(tiny_game, broken, *SAVED, *more, steps=STEPS)]
    killed = Killed(argv, seconds, seed=len(more))
    codes = [killed.end_by(signal.SIGKILL) for _ in range(3)]
    assert -signal.SIGKILL in codes
    finish(argv)
    for part in ("actor/model", "actor/optimizer"):
        one, other = (tensors(each / f"global_step_{STEPS}/{part}") for each in (whole, broken))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), part
    assert numbers_of(whole) == numbers_of(broken)
    killed.require_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("home", ["thread", "process"])
def test_a_court_that_is_ended_again_and_again_gives_the_same_table(
    home: str, tiny_game: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    where = f"agent.environment.isolation={home}"
    argv = [*MAIN, *words(tiny_game, tmp_path / "run", where)]
    argv += ["--judge-credit", f"{tiny_game}/model", "--episodes", "64", "--samples", "2"]
    argv += ["--estimators", "grpo,turn_return,vine", "--out"]
    seconds = timed([*argv, str(whole)])
    argv.append(str(broken))
    killed = Killed(argv, seconds, seed=1)
    codes = [
        killed.end_by(number)
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    ]
    assert any(codes)
    finish(argv)
    for name in ("judged.jsonl", "credit.json", "credit.html"):
        assert (whole / name).read_text() == (broken / name).read_text(), name
    assert names(whole) == names(broken)
    killed.require_nothing_left()


def names(folder: Path) -> set[str]:
    """The files of a folder, those of records of single batches, too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "more",
    [(*VINE, "branching.state=snapshot"), (*TREE, "branching.state=replay")],
    ids=["vine snapshot", "tree replay"],
)
def test_two_ranks_give_the_numbers_of_one(
    more: tuple[str, ...], tiny_game: Path, tmp_path: Path
) -> None:
    assert train(words(tiny_game, tmp_path / "one", *more)) == 0
    ranks = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2")
    assert train(words(tiny_game, tmp_path / "two", *more, *ranks)) == 0
    for one, two in zip(read_steps(tmp_path / "one"), read_steps(tmp_path / "two"), strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
        counts = [
            {name: value for name, value in step.items() if name.startswith("branching/")}
            for step in (one, two)
        ]
        assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_court_on_two_ranks_gives_the_table_of_one(tiny_game: Path, tmp_path: Path) -> None:
    results = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        launched = ("trainer.launcher=ray", f"trainer.n_gpus_per_node={ranks}")
        argv = [*words(tiny_game, folder, *launched), "--judge-credit", f"{tiny_game}/model"]
        argv += ["--episodes", "12", "--samples", "2", "--estimators", "grpo,turn_return,vine"]
        assert train(argv) == 0
        results.append(json.loads((folder / "credit/model/credit.json").read_text()))
    one, two = results
    counted = [key for key in one if key not in ("sentence", "estimators")]
    assert {key: one[key] for key in counted} == {key: two[key] for key in counted}
    for name, told in one["estimators"].items():
        for key, values in told.items():
            expected = pytest.approx([float(each) for each in values], rel=1e-3, abs=1e-4)
            assert [float(each) for each in two["estimators"][name][key]] == expected, (name, key)
