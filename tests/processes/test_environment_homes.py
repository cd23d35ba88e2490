"""What an environment's process may have: time, memory, network; and what ends with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import psutil
import pytest

from custom.agent import AgentSpec
from custom.confine import Limits
from custom.env_factory import Library
from custom.own_generators import OwnGenerators
from tests.unit.pool_environments import Guarded, Lasting
from training.config import EnvironmentChoice, PPOConfig
from training.config.leaves import anchored
from training.config.schema.agent import AgentConfig
from workers.environments.clock import TaskClock
from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply, read_reply
from workers.environments.server import EnvServer

ROOT = Path(__file__).resolve().parents[2]


def guarded_pool(**settings: object) -> EnvironmentPool:
    specs = [AgentSpec(Guarded)]
    return EnvironmentPool(specs, isolation="process", **settings)  # type: ignore[arg-type]


def reply_to(pool: EnvironmentPool, text: str) -> StepReply:
    """Plays one step of a fresh episode, which goes on."""
    key = random.random()
    pool.reset(key, 0, 0)
    assert not wait(pool).failure
    pool.step(key, text)
    return wait(pool)


def wait(pool: EnvironmentPool) -> StepReply:
    [(_, reply)] = pool.poll(60.0)
    return reply


def is_gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


@contextlib.contextmanager
def spinning(processes: int) -> Iterator[None]:
    """Keeps processor 0 busy."""
    context = multiprocessing.get_context("fork")
    spinners = [context.Process(target=_spin, daemon=True) for _ in range(processes)]
    for spinner in spinners:
        spinner.start()
    # They are forked from a large process.
    time.sleep(1.0)
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin() -> None:
    # Linux shares processors out among sessions.
    os.setsid()
    os.sched_setaffinity(0, {0})
    while True:
        pass


def test_a_process_gets_no_more_memory_than_its_limit() -> None:
    with guarded_pool(limits=Limits(memory_gb=0.5)) as pool:
        assert reply_to(pool, "allocate 50").messages[0]["content"] == str(50 << 20)
        refused = reply_to(pool, "allocate 600")
        assert refused.failure == "env_crash" and "MemoryError" in refused.error


@pytest.mark.parametrize("network", [True, False])
def test_a_process_reaches_the_network_only_where_it_may(network: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        guarded_pool(limits=Limits(network=network)) as pool,
    ):
        answer = reply_to(pool, f"connect {server.getsockname()[1]}").messages[0]["content"]
        assert (answer == "connected") is network


@pytest.mark.parametrize(
    "act", ["fork first", "fork late", "fork around", "speak reply", "speak garbage"]
)
def test_a_call_gets_its_own_reply_whatever_the_environment_says_unasked(
    act: str, caplog: pytest.LogCaptureFixture
) -> None:
    with guarded_pool(step_timeout_s=30.0) as pool:
        heard = []
        for text in (act, "echo a", "echo b", "echo c"):
            pool.reset(text, 0, 0)
            assert wait(pool).messages[0]["content"] == "ready"
            pool.step(text, text)
            reply = wait(pool)
            heard.append((reply.messages[0]["content"], reply.reward))
            # Let a late child come back.
            time.sleep(0.3)
            pool.finish(text, "done")
            assert not wait(pool).failure
        first = "of the parent" if act.startswith("fork") else "spoken"
        assert heard == [(first, 0.0), ("a", 0.0), ("b", 0.0), ("c", 0.0)]
        assert pool.num_strays == {"Guarded": 1}
    assert "environment Guarded answered calls that nobody made" in caplog.text


def test_a_child_that_an_environment_in_a_thread_forks_does_not_go_on_with_the_run(
    tmp_path: Path,
) -> None:
    program = (
        "import os, time\n"
        "from custom.agent import AgentSpec\n"
        "from tests.unit.pool_environments import Guarded\n"
        "from workers.environments.pool import EnvironmentPool\n"
        "with EnvironmentPool([AgentSpec(Guarded)]) as pool:\n"
        "    pool.reset('a', 0, 0); pool.poll(60)\n"
        "    pool.step('a', 'fork late'); [(_, reply)] = pool.poll(60)\n"
        "    assert reply.messages[0]['content'] == 'of the parent'\n"
        "    time.sleep(0.5)\n"
        "    os.waitpid(-1, os.WNOHANG)\n"
        "    pool.finish('a', ''); pool.poll(60)\n"
        "    assert pool.num_strays == {'Guarded': 1}, pool.num_strays\n"
        "print('done', os.getpid())\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 1
    assert "environment Guarded forked in step" in done.stderr


@pytest.mark.parametrize("ending", ["die", "hang", ""])
def test_what_an_environment_started_in_another_session_ends_with_its_home(
    ending: str, tmp_path: Path
) -> None:
    with guarded_pool(step_timeout_s=1.0 if ending == "hang" else 30.0) as pool:
        pool.reset("a", 0, 0)
        wait(pool)
        pool.step("a", f"daemon {tmp_path / 'pid'}")
        assert wait(pool).messages[0]["content"] == "started"
        daemon = int((tmp_path / "pid").read_text())
        assert psutil.pid_exists(daemon)
        if ending:
            pool.step("a", ending)
            assert wait(pool).failure
            assert is_gone(daemon)
    assert is_gone(daemon)


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="other systems do not tell how long a thread waits for a processor",
)
def test_a_deadline_counts_the_environments_own_time_not_that_of_a_busy_machine() -> None:
    with guarded_pool(step_timeout_s=0.8) as pool:
        assert not reply_to(pool, "compute 0.1").failure
        with spinning(4):
            started = time.monotonic()
            reply = reply_to(pool, "compute 0.5")
            assert time.monotonic() - started > 1.3, (
                "the machine was not busy, so that this shows nothing"
            )
            assert not reply.failure and reply.seconds < 0.8
            assert reply_to(pool, "compute 1.1").failure == "env_timeout"


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="other systems do not tell how long a thread waits for a processor",
)
def test_a_call_that_a_busy_machine_holds_up_has_a_ceiling_by_the_walls_clock() -> None:
    with guarded_pool(step_timeout_s=0.8, step_wall_timeout_s=1.2) as pool:
        assert not reply_to(pool, "compute 0.1").failure
        with spinning(8):
            started = time.monotonic()
            reply = reply_to(pool, "compute 0.7")
            assert time.monotonic() - started >= 1.2
        assert reply.failure == "env_timeout"
        assert "by the wall's clock (agent.step_wall_timeout_s)" in reply.error


def test_the_task_clock_runs_while_a_thread_sleeps() -> None:
    clock = TaskClock()
    clock.begin(f"self/task/{threading.get_native_id()}")
    time.sleep(0.1)
    assert 0.09 < clock.elapsed() < 0.5
    assert 0.09 < clock.end() < 0.5
    assert clock.elapsed() == 0.0


def test_generators_of_ones_own_are_waited_for_and_give_equal_seeds_equal_draws() -> None:
    inside = threading.Event()

    def draws(slowly: bool) -> list[float]:
        drawn = []
        with OwnGenerators(7).installed():
            for _ in range(3):
                drawn += [random.random(), float(np.random.random())]
                inside.set()
                time.sleep(0.3 if slowly else 0)
        return drawn

    slow: list[float] = []
    thread = threading.Thread(target=lambda: slow.extend(draws(True)))
    thread.start()
    assert inside.wait(5)
    fast = draws(False)
    thread.join()
    assert fast == slow


def home(name: str | None, **settings: object) -> tuple[object, ...]:
    own = EnvironmentChoice(name=name, **settings)  # type: ignore[arg-type]
    made = PPOConfig(agent=AgentConfig(environment=own)).environment_home
    return made.isolation, made.network, made.memory_gb


def test_libraries_that_run_texts_live_in_processes_without_network_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chess = Library("chess", "a:B")
    web = Library("web", "a:B", network=True)
    board = Library("board", "a:B", own_process=False)
    brought = {"chess": chess, "web": web, "board": board}
    for reader in ("custom.env_factory", "training.config.schema.ppo"):
        monkeypatch.setattr(f"{reader}.libraries", lambda: brought)
    assert home("chess:Mate-v0") == ("process", False, 4.0)
    assert home("web:mine") == ("process", True, 4.0)
    assert home("board:Go-v4") == ("thread", True, None)
    assert home("mine.games:Game") == ("thread", True, None)
    assert home("chess:Mate-v0", isolation="thread", network=True, memory_gb=1.0) == (
        "thread",
        True,
        1.0,
    )


def test_a_run_keeps_its_folders_when_something_changes_the_current_one(tmp_path: Path) -> None:
    config = anchored(PPOConfig())
    assert config == PPOConfig()
    made = {"path": "tests/conftest.py", "cls": "Game"}
    trainer = PPOConfig().trainer.__class__(default_local_dir="outputs/here")
    config = anchored(PPOConfig(env_template=(made,), trainer=trainer))
    assert config.trainer.run_dir == str(Path("outputs/here").absolute())
    assert config.env_template[0]["path"] == str(Path("tests/conftest.py").absolute())


@pytest.mark.parametrize(
    "sent",
    [
        pickle.dumps(1),
        b"7",
        b'{"messages": 5, "reward": 0, "done": true, "trial": null}',
        b'{"messages": [], "reward": NaN, "done": true, "trial": null}',
        b'{"messages": [], "failure": "odd", "trial": null}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_reply_is_a_crash_and_never_unpickled(sent: bytes) -> None:
    reply = read_reply(sent)
    assert reply.failure == "env_crash" and "no reply" in reply.error


def test_a_reply_comes_back_as_it_was_sent() -> None:
    class Silent:
        tool_schemas = None
        reset_info: ClassVar[dict[str, str]] = {}

        def reset(self, seed: int, task: object = None) -> list[dict[str, str]]:
            return [{"role": "user", "content": f"seed {seed} \u2603"}]

    server = EnvServer()
    server.agent = Silent()
    assert read_reply(server.answer("reset", (3,))).messages == [
        {"role": "user", "content": "seed 3 \u2603"}
    ]


def test_a_home_that_stopped_between_calls_is_ended_though_it_does_not_read() -> None:
    with guarded_pool(step_timeout_s=0.5) as pool:
        pool.reset("a", 0, 0)
        wait(pool)
        [slot] = pool._slots
        os.kill(slot.worker._process.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
        pool.step("a", "x" * 3_000_000)
        assert wait(pool).failure == "env_timeout"


def test_a_trial_comes_back_from_a_process_as_it_was() -> None:
    game = AgentSpec(Lasting)
    with EnvironmentPool([game], isolation="process") as pool:
        pool.trial("a", 0, 0, 2, 3)
        trial = wait(pool).trial
        assert trial is not None and trial.max_turns == 9
        assert trial.outcomes["random"].episodes == 2 and not trial.differs
