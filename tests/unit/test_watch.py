"""The watch over a process.

What it writes where nothing moves, what it leaves, and whom it leaves alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from data.watchdog import STALLED, WAKE, Watchdog, watching
from tests.conftest import PROJECT
from workers.environments.reply import StepReply
from workers.rollout.episode import Episode, Row, Turn
from workers.rollout.turn_loop import Batch, RunningEpisode, TurnLoop, describe_unfinished

BEGIN = """
import re, subprocess, sys, threading, time
from pathlib import Path
from data.watchdog import WATCHDOG, beat, watching

def hanging_reward():
    {hang}

with watching({timeout}, Path(sys.argv[1]), "rank_0"):
    WATCHDOG.step, WATCHDOG.place = 3, "reward"
    {before}
    hanging_reward()
"""


def run(
    folder: Path, hang: str, before: str = "pass", timeout: float = 1.0
) -> subprocess.CompletedProcess[str]:
    program = BEGIN.format(hang=hang, before=before, timeout=timeout)
    argv = [sys.executable, "-c", program, str(folder)]
    return subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=60)


@pytest.mark.seconds
def test_a_process_that_stands_still_says_where_and_ends_with_what_it_started(
    tmp_path: Path,
) -> None:
    before = (
        "print(subprocess.Popen(['sleep', '600']).pid, flush=True); beat('a turn was answered')"
    )
    done = run(tmp_path, "threading.Event().wait()", before)
    assert done.returncode == STALLED
    assert "nothing has moved for 1 s (trainer.stall_timeout_s): step 3, reward" in done.stderr
    assert "rank_0: step 3, reward; 1 s after: a turn was answered" in done.stderr
    written = (tmp_path / "rank_0.txt").read_text()
    assert "in hanging_reward" in written and "in _write_record" in written
    assert not psutil.pid_exists(int(done.stdout))


@pytest.mark.seconds
def test_code_that_keeps_the_interpreters_lock_is_ended_too(tmp_path: Path) -> None:
    done = run(tmp_path, "re.match(r'(a+)+$', 'a' * 60 + 'b')")
    assert done.returncode == -WAKE
    assert "in hanging_reward" in done.stderr


@pytest.mark.seconds
def test_who_beats_is_left_alone_and_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path / "stalls", "[(beat('x'), time.sleep(0.1)) for _ in range(25)]")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "stalls").exists()


@pytest.mark.seconds
def test_a_run_that_moves_on_before_it_is_ended_is_left_alone(tmp_path: Path) -> None:
    moves_late = "[(time.sleep(2.3), beat('late')) for _ in range(2)]; time.sleep(0.5)"
    done = run(tmp_path, moves_late, timeout=2.0)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("but now something does, and the run goes on") == 2
    assert "in hanging_reward" in (tmp_path / "rank_0.txt").read_text()


@pytest.mark.seconds
def test_records_of_an_attempt_before_are_not_shown_as_this_ones(tmp_path: Path) -> None:
    for name in ("rank_0", "rank_1"):
        (tmp_path / f"{name}.txt").write_text(f"{name}: step 77, of the attempt before")
    done = run(tmp_path, "threading.Event().wait()")
    assert done.returncode == STALLED
    assert "rank_0: step 3, reward" in done.stderr and "step 77" not in done.stderr
    assert "step 77" in (tmp_path / "rank_1.txt.old").read_text()


@pytest.mark.seconds
def test_who_waits_for_a_rank_that_moves_is_left_alone_and_all_write_when_none_does(
    tmp_path: Path,
) -> None:
    begin = (
        "import sys, time; from pathlib import Path\n"
        "from data.watchdog import WATCHDOG, WatchdogSettings, beat\n"
        "from torch.distributed import TCPStore\n"
        "rank = int(sys.argv[2])\n"
        "port = int(sys.argv[3])\n"
        "if rank == 0:\n"
        "    server = TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False)\n"
        "settings = WatchdogSettings(2.0, Path(sys.argv[1]), ('127.0.0.1', port))\n"
        "WATCHDOG.start(settings, f'rank_{rank}', driver=rank == 0)\n"
        "begun = time.time()\n"
        "while rank and time.time() < begun + 5: beat('a micro-batch'); time.sleep(0.1)\n"
        "time.sleep(600)\n"
    )
    port = str(20000 + os.getpid() % 10000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", begin, str(tmp_path), rank, port],
            cwd=PROJECT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    _, said = ranks[0].communicate(timeout=90)
    ranks[1].send_signal(signal.SIGKILL)
    ranks[1].communicate()
    assert ranks[0].returncode == STALLED
    assert "rank_1: before the first step; 2 s after: a micro-batch" in said
    assert "rank_0: before the first step; 2 s after: nothing yet" in said, said


def test_nothing_is_watched_where_nothing_is_asked(tmp_path: Path) -> None:
    with watching(None, tmp_path / "stalls", "rank_0"):
        assert not (tmp_path / "stalls").exists()


def test_what_is_shown_is_the_oldest_episode_and_the_queue() -> None:
    loop = TurnLoop(None)  # type: ignore[arg-type]
    episodes = [Episode(group=0, sample=k, rows=[Row(prompt_ids=[1, 2])]) for k in range(3)]
    batch = Batch(episodes, None, [])  # type: ignore[arg-type]
    batch.waiting.append((episodes[2], 2))
    loop.batches = [batch]
    loop.running = {
        key: RunningEpisode(None, episodes[key], batch, started_at)  # type: ignore[arg-type]
        for key, started_at in ((0, 1.0), (1, 0.5))
    }
    loop.sampling, loop.stepping = {"0": (0, 0)}, {1}
    episodes[1].turns = [Turn(text="guess 5", finish_reason="stop", reply=StepReply(reward=0.5))]
    said = describe_unfinished(loop)
    assert "the engine's queue: 1 turns; tokens by episode: {0: 2}" in said
    assert "the oldest: episode 1 " in said and "guess 5" in said and "reward=0.5" in said
    assert "with environments: episodes [1]" in said and "not begun: 1" in said


def test_what_is_gone_is_not_shown(tmp_path: Path) -> None:
    class Thing:
        pass

    watch, thing = Watchdog(), Thing()
    watch.show(lambda thing: "there", thing)
    assert watch._shown is not None and watch._shown() is thing
    del thing
    assert watch._shown() is None
