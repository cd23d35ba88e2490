"""Runs that fail: what they say and leave, how they are started again and what they end with."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import main
from data.watchdog import STALLED
from features.run_page.events import read_events
from tests.conftest import PROJECT
from tests.e2e.test_resume import listen_to_ctrl_c, own_environment, steps_logged
from tests.e2e.test_training import read_steps, tiny_argv
from training.run.signals import EndingSignals

# Reads its name from a file, and does each of what is written there once, at the call that stands
# before it.
REWARD = """
import os, re, signal, sys, time
from pathlib import Path
calls = 0

def compute_score(data_source, solution_str, ground_truth, extra_info, faults):
    global calls
    calls += 1
    left = Path(faults).read_text().split()
    if not left or calls < int(left[0].split(":")[0]):
        return 0.1 * len(solution_str)
    Path(faults).write_text(" ".join(left[1:]))
    fault = left[0].split(":")[1]
    if fault == "hang":
        time.sleep(600)
    elif fault == "regex":
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise ValueError("no score today")
"""
RESTART = re.compile(
    r"restart \d of \d: the run .* \(exit code (\d+), .*; it goes on from (.*), with (.*)"
)


class FailingRun:
    """`main.py` on the tiny task, whose reward function fails.

    FAULTS are words like 12:hang, for its twelfth call.
    """

    def __init__(self, task: Path, folder: Path, faults: str, *overrides: str) -> None:
        self.folder, self.log = folder / "run", folder / "stderr"
        (folder / "reward.py").write_text(REWARD)
        (folder / "faults").write_text(faults)
        argv = [
            *tiny_argv(task, self.folder, "data.val_files=null", "trainer.total_training_steps=5"),
            *(
                "trainer.save_freq=1",
                "trainer.deterministic=true",
                f"custom_reward_function.path={folder}/reward.py",
            ),
            f"custom_reward_function.reward_kwargs.faults={folder}/faults",
            *overrides,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROJECT / "main.py"), *argv],
                cwd=PROJECT,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=own_environment(),
                preexec_fn=listen_to_ctrl_c,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def end(self, timeout: float = 120) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            for process in (
                psutil.Process(self.process.pid).children(recursive=True)
                if self.process.poll() is None
                else ()
            ):
                process.kill()
            self.process.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("faults", "codes"),
    [
        ("20:hang 20:raise", [STALLED, 1]),
        pytest.param(
            "20:regex 20:kill",
            [128 + signal.SIGVTALRM, 128 + signal.SIGKILL],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_that_fails_goes_on_from_its_last_checkpoint(
    tiny_task, tmp_path, faults, codes
) -> None:
    """8 scores a step, and a checkpoint is whole in the next one or at its end.

    Each attempt gains one step or two.
    """
    run = FailingRun(
        tiny_task, tmp_path, faults, "trainer.stall_timeout_s=10", "trainer.max_restarts=2"
    )
    assert run.end() == 0, run.said
    found = [(int(code), start) for code, start, _ in RESTART.findall(run.said)]
    assert [code for code, _ in found] == codes, run.said
    first, second = (int(start.removeprefix("step ")) for _, start in found)
    assert first in (1, 2) and second in (first + 1, first + 2), run.said
    assert [step["step"] for step in read_steps(run.folder)] == [1, 2, 3, 4, 5]
    restarts = [event for event in read_events(run.folder / "events.jsonl") if "code" in event]
    assert [event["code"] for event in restarts] == codes
    assert '"status":"finished"' in (run.folder / "report.html").read_text()
    if "raise" in faults:
        assert "failed with ValueError: no score today in" in run.said
        assert "Traceback" not in run.said.partition("no score today")[2]
    if codes[0] == STALLED:
        assert "nothing has moved for 10 s (trainer.stall_timeout_s): step 3, reward" in run.said
        assert f"rank_0, step {first + 3}, reward" in run.said, "an error says where it came"
    else:
        assert not (run.folder / "stalls").exists()


@pytest.mark.long
def test_restarts_come_to_an_end(tiny_task, tmp_path) -> None:
    # The first call of each attempt is that on a made-up answer, before a model is loaded.
    run = FailingRun(tiny_task, tmp_path, "2:raise 2:kill", "trainer.max_restarts=1")
    assert run.end() == 128 + signal.SIGKILL, run.said
    assert [*RESTART.findall(run.said)] == [("1", "where it began", "the same settings")]
    assert "rank_0, step 1, reward" in run.said
    # The supervisor tells of the attempt that could not.
    events = list(read_events(run.folder / "events.jsonl"))
    assert [event["kind"] for event in events] == ["start", "end", "restart", "start", "end"]
    assert events[-1]["code"] == 128 + signal.SIGKILL
    page = (run.folder / "report.html").read_text()
    assert '"status":"crashed"' in page and "failed without a word (exit code 137" in page


@pytest.mark.long
@pytest.mark.parametrize("supervised", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_in_a_rollout_saves_and_leaves(tiny_task, tmp_path, supervised) -> None:
    more = (
        "trainer.total_training_steps=1000",
        "trainer.save_freq=-1",
        f"trainer.max_restarts={int(supervised)}",
    )
    run = FailingRun(tiny_task, tmp_path, "", *more)
    while run.process.poll() is None and steps_logged(run.folder) < 2:
        time.sleep(0.05)
    run.process.terminate()
    assert run.end(60) == 128 + signal.SIGTERM, run.said
    saved = re.search(r"saved step (\d+) in ", run.said)
    assert saved is not None and (run.folder / f"global_step_{saved[1]}").is_dir(), run.said
    assert "restart 1" not in run.said
    assert '"status":"interrupted"' in (run.folder / "report.html").read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once_however_the_first_one_waits(tiny_task, tmp_path) -> None:
    run = FailingRun(
        tiny_task, tmp_path, "12:hang", "trainer.max_restarts=1", "trainer.stall_timeout_s=null"
    )
    while run.process.poll() is None and (tmp_path / "faults").read_text():
        time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert run.process.poll() is None, "a step comes to its end"
    assert "SIGINT: ending the run after this step; once more: at once" in run.said
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 128 + signal.SIGINT, run.said


HANGING = """
import sys, time
from main import main
from workers.hf_rollout import HFRollout

generate, asked = HFRollout.step, []

def step(engine):
    asked.append(1)
    return generate(engine) if len(asked) < 3 else {stands}

HFRollout.step = step
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("stands", ["time.sleep(600)", pytest.param("[]", marks=pytest.mark.slow)])
def test_an_engine_that_hangs_shows_its_queue_and_the_oldest_episode(
    tiny_game, tmp_path, stands
) -> None:
    """In a call that does not return, or by calls that give nothing."""
    argv = [
        *(
            "configs/quickstart.yaml",
            f"actor_rollout_ref.model.path={tiny_game}/model",
            "trainer.val_before_train=false",
        ),
        *(
            f"trainer.default_local_dir={tmp_path}/run",
            "trainer.logger=file",
            "trainer.stall_timeout_s=8",
        ),
        *(
            "agent.agent_length=8",
            "actor_rollout_ref.rollout.n=1",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        ),
    ]
    command = [sys.executable, "-c", HANGING.format(stands=stands), *argv]
    done = subprocess.run(
        command, cwd=PROJECT, env=own_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == STALLED, done.stderr
    assert "nothing has moved for 8 s (trainer.stall_timeout_s): step 1, gen" in done.stderr
    record = (tmp_path / "run" / "stalls" / "rank_0.txt").read_text()
    assert "workers/rollout/turn_loop.py" in record
    assert re.search(r"the engine's queue: \d turns; tokens by episode: \{\d: \d+", record)
    assert re.search(r"the oldest: episode \d .*, \d turns, the last: Turn\(text='", record)


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_a_reward_function_that_raises_in_a_step_ends_the_run_in_one_line(
    tiny_task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], manager: str
) -> None:
    """It may bear the answer that is made up before the first step."""
    source = """def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"]:
        return {}["missing"]
    return 0.0
"""
    (tmp_path / "mine.py").write_text(source)
    argv = tiny_argv(
        tiny_task,
        tmp_path / "run",
        f"custom_reward_function.path={tmp_path}/mine.py",
        f"reward_model.reward_manager={manager}",
        "trainer.val_before_train=false",
        "data.shuffle=false",
    )
    assert main.run(argv, EndingSignals()) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert re.search(r"compute_score \(\S+mine.py:1\) failed with KeyError\W+missing", said), said
    with pytest.raises(RuntimeError, match="failed with KeyError"):
        main.run([*argv, "--debug"], EndingSignals())
