"""Ranks that fail under Ray.

What the run says of them, and that it goes on with nothing left of the attempt before.
"""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from data.watchdog import STALLED
from tests.conftest import PROJECT
from tests.e2e.test_cleanup import Start, start
from tests.e2e.test_failures import RESTART
from tests.e2e.test_training import read_steps
from training.run.exit_codes import OUT_OF_MEMORY

pytest.importorskip("ray")
__all__ = ["start"]  # the fixture


def failing(folder: Path, faults: str) -> list[str]:
    (folder / "faults").write_text(faults)
    return [
        f"custom_algorithm={PROJECT}/tests/e2e/failing_loss.py",
        "actor_rollout_ref.actor.policy_loss.loss_mode=failing",
        f"actor_rollout_ref.actor.policy_loss.custom_kwargs.faults={folder}/faults",
        "trainer.total_training_steps=6",
        "trainer.save_freq=1",
    ]


WHERE = r"rank 1 of 2, role actor_rollout, in update_actor, step \d, update_actor"


@pytest.mark.slow
def test_a_nan_and_a_rank_that_dies_are_named_and_the_run_goes_on(
    start: Start, tmp_path: Path
) -> None:
    run = start(*failing(tmp_path, "nan exit"), "trainer.max_restarts=1")
    code, said = run.end(), run.log.read_text()
    assert code == 0, said[-5000:]
    assert re.search(
        r"step \d, mini-batch \d of 4 of the actor: "
        r"its gradient has norm nan, from the loss of ranks \[1\];",
        said,
    )
    restarts = RESTART.findall(said)
    assert [int(code) for code, _, _ in restarts] == [1]
    assert re.search(WHERE, said), said[-5000:]
    assert [step["step"] for step in read_steps(run.folder)] == [*range(1, 7)], "every step once"


@pytest.mark.slow
def test_a_rank_out_of_memory_is_restarted_with_half_the_tokens(
    start: Start, tmp_path: Path
) -> None:
    run = start(*failing(tmp_path, "memory"), "trainer.max_restarts=1")
    code, said = run.end(), run.log.read_text()
    assert code == 0, said[-5000:]
    restarts = RESTART.findall(said)
    assert [int(code) for code, _, _ in restarts] == [OUT_OF_MEMORY]
    assert re.search(WHERE, said), said[-5000:]
    assert "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048" in restarts[0][2]
    assert "ppo_max_token_len_per_gpu: 2048" in (run.folder / "config.yaml").read_text()


@pytest.mark.slow
def test_a_rank_that_hangs_has_every_rank_write_where_it_stands(
    start: Start, tmp_path: Path
) -> None:
    run = start(*failing(tmp_path, "hang"), "trainer.stall_timeout_s=60")
    assert run.end() == STALLED, run.log.read_text()[-5000:]
    assert re.search(
        r"nothing has moved for 60 s \(trainer.stall_timeout_s\): step \d, update_actor",
        run.log.read_text(),
    )
    records = {path.stem: path.read_text() for path in (run.folder / "stalls").iterdir()}
    assert records.keys() == {"driver", "rank_0", "rank_1"}
    assert (
        "update_actor of role actor_rollout" in records["rank_1"]
        and "in failing_loss" in records["rank_1"]
    )
    assert (
        "update_actor of role actor_rollout" in records["rank_0"]
        and "in wait_for" in records["driver"]
    )


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_to_the_next_attempt(start: Start, tmp_path: Path) -> None:
    run = start("trainer.max_restarts=1", "trainer.save_freq=1", "trainer.total_training_steps=4")
    run.until_training()
    attempt = psutil.Process(run.process.pid).children()[0]
    of_ray = [
        process
        for process in attempt.children(recursive=True)
        if "ray" in " ".join(process.cmdline())
    ]
    assert of_ray
    attempt.kill()
    run.until(lambda: "restart 1 of 1" in run.log.read_text())
    # One that ended and that nobody waits for stays as a zombie, in containers without an init.
    assert not [
        process
        for process in of_ray
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert run.end() == 0, run.log.read_text()[-3000:]
