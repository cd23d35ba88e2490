"""What a run ends with, as docs/failures.md says it, and how lack of memory is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

import main
from data.plain_state import CannotSave
from data.watchdog import NOT_WATCHING, STALLED, WATCHDOG, WatchdogSettings
from tests.conftest import PROJECT
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.features import Feature
from training.observers import RunStopped
from training.run import out_of_memory
from training.run.abort_policy import EnvironmentsFail
from training.run.checkpoint import CheckpointError
from training.run.checkpoint_folders import CannotResume
from training.run.exit_codes import MEND, OUT_OF_MEMORY
from training.run.leftovers import ends_leftovers
from training.run.out_of_memory import MemoryKills
from training.run.signals import ENDING_SIGNALS, EndingSignals, set_handlers

# Ray's own text of any actor that ends without a word.
DIED = (
    "The actor died unexpectedly before finishing this task. There are some potential root causes. "
    "(1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop "
    "--force is called. (3) The worker is crashed unexpectedly due to SIGSEGV"
)


class ActorDiedError(Exception):
    """Plays Ray's."""


class OutOfMemoryError(Exception):
    """Plays Ray's, and torch's."""


def too_much() -> Exception:
    """What numpy raises in a process whose memory is limited (RLIMIT_AS, ulimit -v)."""
    try:
        np.ones(1 << 60, dtype=np.uint8)
    except MemoryError as error:
        return error
    raise AssertionError


@pytest.fixture
def signals_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    set_handlers(dict.fromkeys(ENDING_SIGNALS, signal.SIG_DFL))
    yield
    set_handlers(before)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        (lambda: None, 0),
        (lambda: CheckpointError("no room"), 1),
        (ValueError("wrong"), 1),
        (KeyError("own code"), "raises"),
        (ConfigError(["no such environment"]), 2),
        (RunStopped("alarm", MEND), MEND),
        (RunStopped("tokens", 7), 7),
        (EnvironmentsFail("they fail"), MEND),
        (CannotResume("LATEST points at nothing"), MEND),
        (CannotSave("the estimator's state has a function"), MEND),
        (MemoryError(), OUT_OF_MEMORY),
        (too_much(), OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), OUT_OF_MEMORY),
        (OSError(12, "Cannot allocate memory"), OUT_OF_MEMORY),
        (OutOfMemoryError("Task was killed due to the node running low on memory."), OUT_OF_MEMORY),
        (ActorDiedError(DIED), "raises"),
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value)[:40],
)
def test_every_ending_has_the_code_that_the_docs_name(
    monkeypatch, capsys, signals_back, ending, code
) -> None:
    def train(config: PPOConfig, signals: object) -> object:
        if isinstance(ending, signal.Signals):
            os.kill(os.getpid(), ending)
            time.sleep(5)
        if isinstance(ending, Exception):
            raise ending
        return ending()

    config = PPOConfig()
    loaded = SimpleNamespace(config=config, explain=False)
    monkeypatch.setattr(main, "load_config", lambda words, **options: loaded)
    monkeypatch.setattr(main, "try_before_heavy_imports", lambda config: None)
    monkeypatch.setattr(main, "train", train)
    if code == "raises":
        # The interpreter prints its traceback and ends with 1.
        with pytest.raises(type(ending)):
            main.main(["config.yaml"])
        return
    assert main.main(["config.yaml"]) == code
    if code == OUT_OF_MEMORY:
        assert "Memory ran out: lower ppo_max_token_len_per_gpu" in capsys.readouterr().err
        assert main.main(["config.yaml", "--debug"]) == code
        assert "Traceback" in capsys.readouterr().err


class Ends:
    """Ends as it is told, and kills a child in its clean-up, as a DataLoader's worker is killed."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def fit(self) -> None:
        raise self.error

    def shutdown(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    "error", [KeyError("own"), MemoryError(), RunStopped("alarm", MEND), KeyboardInterrupt()]
)
def test_a_child_that_is_killed_at_the_end_does_not_hide_what_ended_the_run(
    signals_back, error: BaseException
) -> None:
    def raises(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed by signal: Killed")

    before = signal.signal(signal.SIGCHLD, raises)
    signals = EndingSignals()
    signals.received = signal.SIGINT
    try:
        with pytest.raises(type(error)) as raised:
            main.fit(Ends(error), signals, "driver")  # type: ignore[arg-type]
        assert raised.value is error
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_docs_list_these_codes() -> None:
    table = (PROJECT / "docs/failures.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    listed = {int(code) for row in rows for code in row.split(",")}
    assert listed == {0, 130, 143, 129, 2, MEND, OUT_OF_MEMORY}
    assert f"({STALLED}: stalled" in table


@pytest.mark.parametrize(
    "counted", ["/proc/vmstat", "memory/group/memory.oom_control", "group/memory.events"]
)
def test_a_rank_that_the_system_killed_for_memory_says_so(
    monkeypatch, tmp_path: Path, counted: str
) -> None:
    file = tmp_path / counted.lstrip("/")
    file.parent.mkdir(parents=True)
    file.write_text("low 0\noom 7\noom_kill 3\noom_group_kill 9\n")
    monkeypatch.setattr(out_of_memory, "_files_of_own_group", lambda: iter([file]))
    kills = MemoryKills()
    error = ActorDiedError(DIED)
    assert not kills.any_since() and kills.explain(error) == ""
    file.write_text("low 0\noom 8\noom_kill 4\noom_group_kill 9\n")
    assert kills.any_since() and kills.explain(ValueError("own")) == ""
    error.add_note(f"rank 1 of 2, role actor, in update_actor, step 3; {kills.explain(error)}")
    line = main.in_one_line(error, PPOConfig())
    assert line is not None and "the system killed a process, out of memory" in line


@pytest.mark.seconds
def test_what_an_environment_leaves_behind_is_ended_and_counted(caplog) -> None:
    """A process in a session of its own, whose parent has ended."""
    daemonize = (
        "import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session=True, "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
    )
    with ends_leftovers():
        done = subprocess.run([sys.executable, "-c", daemonize], capture_output=True, text=True)
        left = psutil.Process(int(done.stdout))
        # Its parent is the system, or this process, where Ray has made it adopt orphans.
        assert left.is_running()
    assert has_ended(left)
    assert "1 processes that environments, tools or rewards had started" in caplog.text
    assert f"sleep ({left.pid})" in caplog.text
    caplog.clear()
    with ends_leftovers():
        subprocess.run(["true"], check=True)
    # Threads of earlier tests may log, too.
    assert "outlived the run" not in caplog.text


@pytest.mark.seconds
def test_what_is_left_behind_is_ended_also_under_the_number_of_an_earlier_process(
    monkeypatch, caplog
) -> None:
    """psutil remembers processes by their numbers, which a busy machine soon gives again."""
    with ends_leftovers():
        left = subprocess.Popen(["sleep", "300"], start_new_session=True)
        earlier = psutil.Process(left.pid)
        earlier._create_time = 1.0
        earlier._ident = (left.pid, 1.0)
        monkeypatch.setattr(psutil, "_pmap", {left.pid: earlier}, raising=False)
    try:
        left.wait(timeout=5)
        assert f"sleep ({left.pid})" in caplog.text
    finally:
        left.kill()


def has_ended(process: psutil.Process, longest_s: float = 20.0) -> bool:
    """Tells whether a process has ended, or does so soon; its parent may not have asked yet."""
    end = time.monotonic() + longest_s
    while time.monotonic() < end:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_run_whose_environment_clears_the_environment_variables_ends_well(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with ends_leftovers():
        os.environ.clear()


@pytest.mark.seconds
def test_what_was_only_forked_is_ended_too(tmp_path: Path) -> None:
    """Its environment, as others see it, is that of this process's start."""
    number = tmp_path / "pid"
    with ends_leftovers():
        child = os.fork()
        if child == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                number.write_text(str(os.getpid()))
                time.sleep(300)
            os._exit(0)
        os.waitpid(child, 0)
        while not number.exists() or not number.read_text():
            time.sleep(0.01)
        left = psutil.Process(int(number.read_text()))
    assert has_ended(left)


def test_building_is_watched_as_it_runs_code_of_users(monkeypatch, tmp_path: Path) -> None:
    seen = []

    def build(config: PPOConfig) -> None:
        seen.append(WATCHDOG.settings)
        raise ConfigError(["no such environment"])

    monkeypatch.setattr("training.building.build_trainer", build)
    trainer = replace(PPOConfig().trainer, default_local_dir=str(tmp_path), stall_timeout_s=500.0)
    with pytest.raises(ConfigError):
        main.train(replace(PPOConfig(), trainer=trainer), EndingSignals())
    assert seen == [WatchdogSettings(500.0, tmp_path / "stalls")]
    assert WATCHDOG.settings == NOT_WATCHING


def test_an_interrupt_that_no_signal_made_is_a_failure_of_the_code_that_raised_it() -> None:
    def fit() -> None:
        raise KeyboardInterrupt

    trainer: Any = SimpleNamespace(fit=fit, shutdown=lambda: None)
    signals = EndingSignals()
    with pytest.raises(RuntimeError, match="code of yours raised KeyboardInterrupt"):
        main.fit(trainer, signals, "rank_0")
    signals.received = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        main.fit(trainer, signals, "rank_0")


# Behind the run a thread of a user's, then libraries, hold the process up.
HELD_UP = """
import atexit, runpy, sys, threading, time

def hold_up():
    print("held up", flush=True)
    time.sleep({in_libraries})

atexit.register(hold_up)
threading.Thread(target=time.sleep, args=({in_threads},)).start()
sys.argv = ["main.py", "configs/test_config.yaml", *sys.argv[1:]]
runpy.run_path("main.py", run_name="__main__")
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("option", "held_up_s", "code"),
    [
        ("--help", (30, 0), 128 + signal.SIGTERM),
        ("no.such=1", (30, 0), 2),
        ("--help", (0, 1), 0),
        ("no.such=1", (0, 1), 2),
    ],
    ids=["thread", "thread of a failed run", "libraries", "libraries of a failed run"],
)
def test_sigterm_as_the_process_ends_gives_the_codes_exit_code(
    option: str, held_up_s: tuple[int, int], code: int
) -> None:
    in_threads, in_libraries = held_up_s
    program = HELD_UP.format(in_threads=in_threads, in_libraries=in_libraries)
    with subprocess.Popen(
        [sys.executable, "-c", program, option],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        # What main prints has been printed then, but for the rest of its own end.
        for line in process.stdout:
            if "held up" in line or (in_threads and ("no.such" in line or "--explain" in line)):
                break
        time.sleep(2 if in_threads else 0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == code


def test_a_model_s_missing_folder_is_refused_before_a_mode_s_module_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    # No folder outputs is there.
    monkeypatch.chdir(tmp_path)
    options = ("--play", "--against")
    feature = Feature(modes={"--play": "no.such.module:play"}, model_options=options)
    monkeypatch.setattr("training.modes.features", lambda: {"player": feature})
    words = ["--play=./nope", "--against", "nope/", "trainer.seed=1"]
    assert main.run_in_mode("--play", words, EndingSignals(), debug=False) == 2
    said = capsys.readouterr().err
    assert "--play: there is no ./nope" in said and "--against: there is no nope/" in said
    assert main.run_in_mode("--play", ["--play=outputs/nope"], EndingSignals(), debug=False) == 2
    assert "--play: there is no outputs/nope" in capsys.readouterr().err
