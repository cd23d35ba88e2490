"""Trains the runs of the learning table, each in a process of its own, and keeps what came of them.

A finished run is a line in outputs/learn_table/runs.jsonl and is not made again while its settings
stay. Invariant: killed at any time, a second start goes on, and only one start trains at a time.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.protocol import DataProto
from training.building import build_trainer
from training.config.loader import load_config
from training.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    estimator_needs,
)
from training.features import require_feature

require_feature("run_page", "scripts/learn_table.py")

from features.run_page.report import REWARD_KEY, read_metrics  # noqa: E402

PROJECT = Path(__file__).resolve().parent.parent
FOLDER = PROJECT / "outputs/learn_table"
RUNS = FOLDER / "runs.jsonl"
KINDS = ("estimator", "loss")
SEEDS = (0, 1, 2)
# The teacher's seed, which the table does not have.
TEACHER_SEED = 100
STEPS = 100
# The game: numbers from 1 to HIGHEST, guesses, tasks a step, episodes a task.
HIGHEST = 3
TURNS = 2
TASKS = 16
GROUP = 8
# The mean reward of SMOOTHED steps that a run is to reach; its first reward is a mean of as many.
GOAL = 0.9
SMOOTHED = 5
# Steps whose mean reward is the final one.
LAST = 10

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
# Settings of every run; the rest is configs/quickstart.yaml's.
COMMON = (
    f"agent.environment.kwargs={{high: {HIGHEST}, turns: {TURNS}}}",
    f"agent.max_turn={TURNS}",
    "agent.val_length=0",
    f"data.train_batch_size={TASKS}",
    f"actor_rollout_ref.rollout.n={GROUP}",
    f"{ACTOR}.ppo_mini_batch_size={TASKS // 2}",
    f"{ACTOR}.ppo_epochs=2",
    f"{ACTOR}.optim={{lr: 5.0e-4, scheduler: constant}}",
    "critic.optim={lr: 1.0e-3, scheduler: constant}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
    "trainer.resume_mode=disable",
    "trainer.logger=file",
)


@dataclass(frozen=True)
class Deviation:
    """Holds what an estimator or a loss needs beside COMMON, and why."""

    settings: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Run:
    """Names a run: an estimator with the vanilla loss, or a loss with grpo.

    grpo with vanilla is both, and an estimator.
    """

    kind: str
    name: str
    seed: int

    @property
    def settings(self) -> list[str]:
        """Lists its overrides; none names a folder outside the project."""
        estimator = self.name if self.kind == "estimator" else "grpo"
        loss = self.name if self.kind == "loss" else "vanilla"
        settings = [*COMMON, f"algorithm.adv_estimator={estimator}", f"data.seed={self.seed}"]
        # bypass_mode=true chooses that loss itself.
        if loss != "bypass_mode":
            settings.append(f"{ACTOR}.policy_loss.loss_mode={loss}")
        if self.name in DEVIATIONS:
            settings += DEVIATIONS[self.name].settings
        return settings

    @property
    def folder(self) -> Path:
        """Returns the folder that it writes into."""
        return FOLDER / "runs" / f"{self.kind}_{self.name}_{self.seed}"


TEACHER = Run("estimator", "grpo", TEACHER_SEED)
TEACHER_MODEL = TEACHER.folder.relative_to(PROJECT) / f"global_step_{STEPS}/actor/huggingface"
# By estimator or loss.
DEVIATIONS: dict[str, Deviation] = {
    "gdpo": Deviation(
        ("algorithm.gdpo_reward_keys=[won, early]", "algorithm.gdpo_reward_weights=[1.0, 0.25]"),
        "two kinds of reward: won, and won before the last turn (weight 0.25)",
    ),
    "on_policy_distillation": Deviation(
        (f"actor_rollout_ref.ref.model.path={TEACHER_MODEL}",),
        "the teacher is a policy that grpo trained with another seed; no reward is read",
    ),
    "dro": Deviation((f"{ACTOR}.policy_loss.dro_beta=1.0",), "dro_beta=1 (no default)"),
    "bypass_mode": Deviation(
        (
            f"{CORRECTION}.bypass_mode=true",
            f"{CORRECTION}.loss_type=reinforce",
            f"{CORRECTION}.rollout_is=token",
        ),
        "with loss_type=reinforce and rollout_is=token; with ppo_clip it is vanilla",
    ),
}


def names(kind: str) -> list[str]:
    """Lists estimators or losses, without verl's second names for one function.

    Estimators that read continuations are left out: the game's runs sample none.
    """
    registry: dict[str, Any] = (
        ADV_ESTIMATOR_REGISTRY if kind == "estimator" else POLICY_LOSS_REGISTRY
    )
    return [
        name
        for name in registry
        if not name.endswith("_vectorized") and "branch_returns" not in estimator_needs(name)
    ]


def all_runs() -> list[Run]:
    """Lists the runs of the table, seed by seed, so that an early end leaves all with some."""
    runs = []
    for seed in SEEDS:
        for kind in KINDS:
            for name in names(kind):
                # grpo with vanilla is a run of the estimators.
                if (kind, name) != ("loss", "vanilla"):
                    runs.append(Run(kind, name, seed))
    return runs


# The results of runs.


def outcome(run: Run, seconds: float) -> dict[str, Any]:
    """Reads from a finished run what the table shows.

    Args:
        run: which one.
        seconds: the CPU time that it took.
    Returns:
        A line of runs.jsonl; `reached` is None where the smoothed reward stayed below GOAL.
    """
    rewards = read_metrics(run.folder / "metrics.jsonl")[REWARD_KEY].tolist()
    if len(rewards) != STEPS:
        raise ValueError(f"{run}: {len(rewards)} of {STEPS} steps have a reward")
    return {
        "kind": run.kind,
        "name": run.name,
        "seed": run.seed,
        "first": round(statistics.fmean(rewards[:SMOOTHED]), 4),
        "final": round(statistics.fmean(rewards[-LAST:]), 4),
        "reached": _step_of_goal(rewards),
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "settings": run.settings,
    }


def _step_of_goal(rewards: list[float]) -> int | None:
    """Returns the first step at which the mean reward of SMOOTHED steps is the goal."""
    for step in range(SMOOTHED, STEPS + 1):
        if statistics.fmean(rewards[step - SMOOTHED : step]) >= GOAL:
            return step
    return None


def append(line: dict[str, Any]) -> None:
    """Adds a line in a single write.

    What a killed writer left before it becomes a line of its own.
    """
    text = json.dumps(line).encode() + b"\n"
    if RUNS.is_file() and RUNS.stat().st_size > 0 and not RUNS.read_bytes().endswith(b"\n"):
        text = b"\n" + text
    with RUNS.open("ab", buffering=0) as file:
        file.write(text)


def finished() -> dict[Run, dict[str, Any]]:
    """Reads the runs that are there with today's settings; a torn line counts as none."""
    lines = {}
    for text in RUNS.read_text().splitlines() if RUNS.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        run = Run(line["kind"], line["name"], line["seed"])
        if line["settings"] == run.settings:
            lines[run] = line
    return lines


# Making runs.


def two_kinds(data: DataProto) -> dict[str, Any]:
    """Gives gdpo its kinds of reward: `won`, and `early`, which is won before the last turn."""
    rewards = data.batch["environment_rewards"]
    won = rewards.sum(dim=1)
    early = won * (data.batch["turn_ids"].amax(dim=1) < TURNS - 1)
    return {
        "reward_tensor": rewards,
        "reward_extra_info": {"won": won.tolist(), "early": early.tolist()},
    }


def train(run: Run, further_settings: Iterable[str]) -> None:
    """Trains, in this process."""
    loaded = load_config(
        [
            str(PROJECT / "configs/quickstart.yaml"),
            f"actor_rollout_ref.model.path={FOLDER / 'task/model'}",
            f"trainer.default_local_dir={run.folder}",
            *run.settings,
            *further_settings,
        ]
    )
    trainer = build_trainer(loaded.config)
    if run.name == "gdpo":
        trainer.reward_fn = two_kinds
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other start trains, nor the last runs of one that was killed.

    Forks hold the lock, too.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(runs: list[Run], jobs: int, further_settings: tuple[str, ...] = ()) -> int:
    """Makes these runs, `jobs` at a time; returns how many failed."""
    waiting = list(runs)
    running: dict[int, Run] = {}
    failed = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[_fork(run, further_settings)] = run
            pid, status = os.wait()
            run = running.pop(pid)
            if status != 0:
                failed += 1
            done = len(runs) - len(waiting) - len(running)
            print(f"[{done}/{len(runs)}] {_result_of(run)}", flush=True)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
    return failed


def _result_of(run: Run) -> str:
    """Writes what came of a run in one line."""
    name = f"{run.kind} {run.name} {run.seed}"
    line = finished().get(run)
    if line is None:
        return f"{name}: failed, see {run.folder}.log"
    return f"{name}: {line['final']:.3f} in {line['seconds']} s"


def _fork(run: Run, further_settings: tuple[str, ...]) -> int:
    """Starts a run in a process of its own and returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _run_in_fork(run, further_settings)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Nothing of the parent's is to be closed here.
            os._exit(code)
    return pid


def _run_in_fork(run: Run, further_settings: tuple[str, ...]) -> int:
    """Makes one run in a fork, its output in RUN.log; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(f"{run.folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        train(run, further_settings)
        append(outcome(run, time.process_time()))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def make_teacher() -> None:
    """Trains the teacher with grpo and a seed of its own, unless it is there."""
    if TEACHER in finished() and (TEACHER.folder / f"global_step_{STEPS}").is_dir():
        return
    exported = (
        f"trainer.save_freq={STEPS}",
        f"{ACTOR}.checkpoint.save_contents=[model, optimizer, extra, hf_model]",
    )
    if make([TEACHER], jobs=1, further_settings=exported):
        raise SystemExit("on_policy_distillation has no teacher")
