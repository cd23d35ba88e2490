"""Whatever ends a run, in every kind of it: the first cause is told, and decides the exit code.

A table of causes and kinds. A kind is how what fails reaches `main.py`: it runs the parts that
stand between the two (threads, futures, groups of ranks, clean-up), around made-up workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

import main
from custom.env import BadRewardFunction
from custom.reward_managers.naive import NaiveRewardManager, RewardSample
from training import building, observers
from training.async_rollout.dedicated_engines import DedicatedEngines
from training.async_rollout.group_streaming import GroupStreamingEngines
from training.async_rollout.prefetch import Prefetch
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.observers import Observer, Observers, RunStopped
from training.reward import run_beside
from training.run.abort_policy import EnvironmentsFail
from training.run.checkpoint import CheckpointSaver
from training.run.checkpoint_folders import CannotResume
from training.run.exit_codes import MEND, OUT_OF_MEMORY
from training.run.signals import EndingSignals
from training.run.step_source import first_cause_told


class Cause(NamedTuple):
    """What is raised, the exit code, and what is told; code None: main raises what says so."""

    error: Callable[[], BaseException]
    code: int | None
    words: str


CAUSES = {
    "own code": Cause(lambda: KeyError("my own mistake"), None, "my own mistake"),
    "a value": Cause(lambda: ValueError("a wrong value"), 1, "a wrong value"),
    "memory": Cause(lambda: MemoryError("no more"), OUT_OF_MEMORY, "Memory ran out: lower"),
    "device": Cause(
        lambda: torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY, "CUDA out of"
    ),
    "reward": Cause(
        lambda: BadRewardFunction("f (mine.py:3) returned None"), 1, "f (mine.py:3) returned"
    ),
    "environments": Cause(lambda: EnvironmentsFail("9 of 10 failed"), MEND, "9 of 10 failed"),
    "alarm": Cause(lambda: RunStopped("alarm kl_jump", MEND), MEND, "alarm kl_jump"),
    "tokens spent": Cause(lambda: RunStopped("all tokens spent", 7), 7, "all tokens spent"),
    "no checkpoint": Cause(
        lambda: CannotResume("LATEST names nothing"), MEND, "LATEST names nothing"
    ),
    "settings": Cause(lambda: ConfigError(["no such game"]), 2, "no such game"),
    "sys.exit()": Cause(lambda: SystemExit(0), None, "code of yours called sys.exit()"),
    "its own Ctrl-C": Cause(
        lambda: KeyboardInterrupt(), None, "code of yours raised KeyboardInterrupt"
    ),
}
# Those that a rank may raise; the others are the driver's.
OF_RANKS = ("own code", "a value", "memory", "device", "reward", "environments", "no checkpoint")
Raise = Callable[[], Any]


# The kinds


def in_a_step(fails: Raise) -> None:
    fails()


def in_the_rewards_thread(fails: Raise) -> None:
    run_beside(fails).result()


def prefetch_of(generate: Callable[..., Any]) -> Prefetch:
    config = PPOConfig()
    config = replace(config, trainer=replace(config.trainer, async_level=1))
    stream: Any = SimpleNamespace(draw=lambda step: {}, position=None)
    return Prefetch(config, stream, generate, lambda batch: None)


def ahead(fails: Raise) -> None:
    """The step is generated in a thread, and waited for."""
    source = prefetch_of(lambda rows, step: fails())
    try:
        source.next_step(1, last=5).result()
    finally:
        source.shutdown()


def ahead_while_training_fails(fails: Raise) -> None:
    """What trains fails for want of the engine that has failed in the step ahead."""

    def generate(rows: Any, step: int) -> Any:
        return ({}, {}) if step == 1 else fails()

    source = prefetch_of(generate)
    try:
        with first_cause_told(source.in_flight):
            source.next_step(1, last=5).result()
            for step in source.in_flight():
                with suppress(BaseException):
                    step.result()
            raise ConnectionError("closed by peer")
    finally:
        source.shutdown()


def streaming_beside_dedicated_engines(fails: Raise) -> None:
    def play(seconds: list[float], to_idle: list[bool]) -> Any:
        fails()

    engines: Any = SimpleNamespace(world_size=1, play=play, begin_batch=lambda batch: None)
    streaming = GroupStreamingEngines(engines, dedicated=True, train_on=lambda part: None)
    streaming._play_on()()


def channel(of_engines: Raise, of_policy: Raise) -> None:
    """The two sides of the channel of weights; each waits for the other."""
    dedicated: Any = DedicatedEngines.__new__(DedicatedEngines)
    dedicated._channel_threads = ThreadPoolExecutor(2)
    dedicated._at_once(of_engines, of_policy)


def receiving_weights(fails: Raise) -> None:
    failed: Future[None] = Future()

    def receive() -> None:
        try:
            fails()
        finally:
            failed.set_result(None)

    def send() -> None:
        failed.result()
        time.sleep(0.3)
        raise ConnectionError("closed by peer")

    channel(receive, send)


def sending_weights(fails: Raise) -> None:
    failed: Future[None] = Future()

    def send() -> None:
        try:
            fails()
        finally:
            failed.set_result(None)

    def receive() -> None:
        failed.result()
        time.sleep(0.3)
        raise ConnectionError("closed by peer")

    channel(receive, send)


def while_a_checkpoint_is_written(fails: Raise) -> None:
    """The save under way fails, too."""
    saver: Any = CheckpointSaver.__new__(CheckpointSaver)
    saver.step, saver.run_dir, saver._folder = 3, "run", "folder"
    saver.poll = lambda wait=False: (_ for _ in ()).throw(OSError("the disk is full"))
    with saver.ends_saves(lambda: None):
        fails()


class FailsAtTheEnd(Observer):
    def run_ended(self, error: BaseException | None) -> None:
        raise MemoryError("an observer's")

    def generation_ends(self, step: int, validate: bool) -> None:
        raise MemoryError("an observer's")


def watched_by_what_fails_too(fails: Raise) -> None:
    run: Any = SimpleNamespace(step=0)
    watching = Observers(run, {"mine": FailsAtTheEnd()})
    with watching.watching(0), watching.generating(1, validate=False):
        fails()


KINDS: dict[str, Callable[[Raise], None]] = {
    "local": in_a_step,
    "reward beside": in_the_rewards_thread,
    "async": ahead,
    "async, behind": ahead_while_training_fails,
    "streaming": streaming_beside_dedicated_engines,
    "weights, received": receiving_weights,
    "weights, sent": sending_weights,
    "checkpoint": while_a_checkpoint_is_written,
    "observers": watched_by_what_fails_too,
}


class Trainer:
    """Runs a kind, and fails in its clean-up as well."""

    in_step = True
    observers = SimpleNamespace(summaries=list)

    def __init__(self, run: Callable[[], None]) -> None:
        self.fit = run

    def shutdown(self) -> None:
        raise OSError("the workers did not end well")


def ending(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    run: Callable[[], None],
) -> tuple[int | None, str]:
    """Returns the exit code of a run and what it told; None: main raised, which ends with 1."""
    config = PPOConfig()
    config = replace(config, trainer=replace(config.trainer, default_local_dir=str(folder)))
    monkeypatch.setattr(building, "build_trainer", lambda config: Trainer(run))
    monkeypatch.setattr(observers, "RAISES", False)
    try:
        code = main.run_training(config, EndingSignals(), debug=False)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return code, capsys.readouterr().err


def raised(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_first_cause_is_told_and_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    kind: str,
    cause: str,
) -> None:
    expected = CAUSES[cause]
    fails = partial(raised, expected.error())
    code, told = ending(monkeypatch, capsys, tmp_path, lambda: KINDS[kind](fails))
    assert expected.words in told
    assert code == expected.code


# Ranks of Ray's hand on an error with its traceback for a text


@pytest.mark.parametrize("cause", OF_RANKS)
def test_a_ranks_error_is_told_by_its_own_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cause: str,
) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    expected = CAUSES[cause]
    error = expected.error()
    trace = f"Traceback (most recent call last):\n  File rank.py\n{type(error).__name__}: {error}"
    of_rank = exceptions.RayTaskError("update_actor", trace, error).as_instanceof_cause()
    code, told = ending(monkeypatch, capsys, tmp_path, partial(raised, of_rank))
    assert expected.words in told and code == expected.code
    if code is not None:
        assert "most recent call last" not in told


# A reward function's own error keeps its exit code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyError("absent"), 1),
        (MemoryError("no more"), OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), OUT_OF_MEMORY),
    ],
)
def test_a_reward_function_that_runs_out_of_memory_ends_as_what_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: Exception,
    code: int,
) -> None:
    def compute_score(**_: Any) -> float:
        raise error

    manager = NaiveRewardManager(None, 0, compute_score)  # type: ignore[arg-type]
    sample = RewardSample(0, "mine", "42", "42", {})
    found, told = ending(monkeypatch, capsys, tmp_path, lambda: manager._score([sample]))
    assert found == code and "compute_score (" in told and str(error.args[0]) in told


# Before the first step


@pytest.mark.parametrize("cause", CAUSES)
def test_what_fails_in_building_is_told_as_well(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cause: str,
) -> None:
    expected = CAUSES[cause]
    if cause == "its own Ctrl-C":
        pytest.skip("as a user's before the first step: 130")
    config = PPOConfig()
    config = replace(config, trainer=replace(config.trainer, default_local_dir=str(tmp_path)))
    monkeypatch.setattr(building, "build_trainer", lambda config: raised(expected.error()))
    try:
        code: int | None = main.run_training(config, EndingSignals(), debug=False)
        told = capsys.readouterr().err
    except Exception as error:
        code, told = None, f"{type(error).__name__}: {error}"
    assert expected.words in told and code == expected.code


# DataLoader's processes, which die in the clean-up


@pytest.mark.long
@pytest.mark.parametrize("cause", ["own code", "memory", "environments"])
def test_workers_that_load_rows_do_not_hide_the_cause(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    cause: str,
) -> None:
    expected = CAUSES[cause]

    def run() -> None:
        with ExitStack() as closing:
            rows = iter(DataLoader(list(range(8)), num_workers=2))
            closing.callback(lambda: [process.kill() for process in rows._workers])  # type: ignore[attr-defined]
            next(rows)
            raise expected.error()

    code, told = ending(monkeypatch, capsys, tmp_path, run)
    assert expected.words in told and code == expected.code
