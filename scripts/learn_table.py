"""Shows that every algorithm learns: `make learn-table` trains all estimators and losses, and writes their table.

Each advantage estimator is trained with the vanilla loss, each policy loss with grpo, with SEEDS each, in the
quickstart's game (smaller: three numbers, two guesses), on one thread a run. A finished run is a line in
outputs/learn_table/runs.jsonl and is not made again while its settings stay; after a change of the code, delete that
file. Invariant: killed at any time, a second start goes on, and only one start trains at a time.

    python scripts/learn_table.py --jobs 2                     # what is missing, then the table in docs/algorithms.md
    python scripts/learn_table.py --only gspo remax --seeds 0  # some of it, no table
    python scripts/learn_table.py --table                      # the table alone, of the runs that are there
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import math
import os
import platform
import signal
import statistics
import sys
import textwrap
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch is imported: a run has one core.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from prepare_quickstart import prepare

from data.protocol import DataProto
from training.building import build_trainer
from training.config.loader import load_config
from training.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from training.run.report import REWARD_KEY, read_metrics

PROJECT = Path(__file__).resolve().parent.parent
FOLDER = PROJECT / "outputs/learn_table"
PAGE = PROJECT / "docs/algorithms.md"
MARKERS = "<!-- learn-table -->", "<!-- /learn-table -->"
SEEDS = (0, 1, 2)
KINDS = ("estimator", "loss")
STEPS, GOAL, SMOOTHED, LAST = 100, 0.9, 5, 10
HIGHEST, TURNS, TASKS, GROUP = 3, 2, 16, 8
DASH = "–"
# What a run needs, imported before the forks, so that each starts at once.
PRELOADED = (
    "training.agent_trainer",
    "workers.fsdp_workers",
    "workers.hf_rollout",
    "transformers.models.llama",
)
ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"

# Of every run; the rest is configs/quickstart.yaml's.
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
# What an estimator or a loss needs beside them, and why.
OVERRIDES: dict[str, tuple[tuple[str, ...], str]] = {
    "gdpo": (
        ("algorithm.gdpo_reward_keys=[won, early]", "algorithm.gdpo_reward_weights=[1.0, 0.25]"),
        "two kinds of reward: won, and won before the last turn (weight 0.25)",
    ),
    "on_policy_distillation": (
        (
            f"actor_rollout_ref.ref.model.path=outputs/learn_table/runs/estimator_grpo_100/global_step_{STEPS}/actor/huggingface",
        ),
        "the teacher is a policy that grpo trained with another seed; no reward is read",
    ),
    "dro": ((f"{ACTOR}.policy_loss.dro_beta=1.0",), "dro_beta=1 (no default)"),
    "bypass_mode": (
        (
            f"{CORRECTION}.bypass_mode=true",
            f"{CORRECTION}.loss_type=reinforce",
            f"{CORRECTION}.rollout_is=token",
        ),
        "with loss_type=reinforce and rollout_is=token; with ppo_clip it is vanilla",
    ),
}


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
        estimator, loss = (
            (self.name, "vanilla") if self.kind == "estimator" else ("grpo", self.name)
        )
        chosen = [f"algorithm.adv_estimator={estimator}", f"data.seed={self.seed}"]
        if loss != "bypass_mode":
            chosen.append(f"{ACTOR}.policy_loss.loss_mode={loss}")
        return [*COMMON, *chosen, *OVERRIDES.get(self.name, ((), ""))[0]]

    @property
    def folder(self) -> Path:
        """Is where it writes."""
        return FOLDER / "runs" / f"{self.kind}_{self.name}_{self.seed}"


# Of a seed that the table does not have.
TEACHER = Run("estimator", "grpo", 100)


def names(kind: str) -> list[str]:
    """Lists estimators or losses, without verl's second names for one function."""
    registry: dict[str, Any] = (
        ADV_ESTIMATOR_REGISTRY if kind == "estimator" else POLICY_LOSS_REGISTRY
    )
    return [name for name in registry if not name.endswith("_vectorized")]


def all_runs() -> list[Run]:
    """Lists the runs of the table, seed by seed, so that an early end leaves all algorithms with some."""
    pairs = [
        (kind, name)
        for kind in KINDS
        for name in names(kind)
        if (kind, name) != ("loss", "vanilla")
    ]
    return [Run(kind, name, seed) for seed in SEEDS for kind, name in pairs]


def two_kinds(data: DataProto) -> dict[str, Any]:
    """Gives gdpo its kinds of reward: `won`, and `early`, which is won before the last turn."""
    rewards = data.batch["environment_rewards"]
    won = rewards.sum(dim=1)
    early = won * (data.batch["turn_ids"].amax(dim=1) < TURNS - 1)
    return {
        "reward_tensor": rewards,
        "reward_extra_info": {"won": won.tolist(), "early": early.tolist()},
    }


def train(run: Run, more: Iterable[str]) -> None:
    """Trains, in this process."""
    own = [
        f"actor_rollout_ref.model.path={FOLDER / 'task/model'}",
        f"trainer.default_local_dir={run.folder}",
    ]
    config = load_config(
        [str(PROJECT / "configs/quickstart.yaml"), *own, *run.settings, *more]
    ).config
    trainer = build_trainer(config)
    if run.name == "gdpo":
        trainer.reward_fn = two_kinds
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.shutdown()


def outcome(run: Run, seconds: float) -> dict[str, Any]:
    """Reads from a finished run what the table shows, with the CPU time that it took.

    `reached` is None where the smoothed reward stayed below GOAL.
    """
    rewards = read_metrics(run.folder / "metrics.jsonl")[REWARD_KEY].tolist()
    if len(rewards) != STEPS:
        raise ValueError(f"{run}: {len(rewards)} of {STEPS} steps have a reward")
    smoothed = (
        statistics.fmean(rewards[end - SMOOTHED : end]) for end in range(SMOOTHED, STEPS + 1)
    )
    reached = next((step for step, mean in enumerate(smoothed, SMOOTHED) if mean >= GOAL), None)
    return {
        "kind": run.kind,
        "name": run.name,
        "seed": run.seed,
        "first": round(statistics.fmean(rewards[:SMOOTHED]), 4),
        "final": round(statistics.fmean(rewards[-LAST:]), 4),
        "reached": reached,
        "seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "settings": run.settings,
    }


def append(line: dict[str, Any]) -> None:
    """Adds a line in a single write; what a killed writer left before it becomes a line of its own."""
    path = FOLDER / "runs.jsonl"
    torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("ab", buffering=0) as file:
        file.write(b"\n" * torn + json.dumps(line).encode() + b"\n")


def finished() -> dict[Run, dict[str, Any]]:
    """Reads the runs that are there with today's settings; a torn line counts as none."""
    path, found = FOLDER / "runs.jsonl", {}
    for text in path.read_text().splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        run = Run(line["kind"], line["name"], line["seed"])
        if line["settings"] == run.settings:
            found[run] = line
    return found


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other start trains, nor the last runs of one that was killed: forks hold the lock, too."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def child(run: Run, more: tuple[str, ...]) -> int:
    """Makes one run in a fork, its output in RUN.log; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(f"{run.folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        train(run, more)
        append(outcome(run, time.process_time()))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(run: Run, more: tuple[str, ...]) -> int:
    """Starts a run in a process of its own and returns its id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) == 0:
        try:
            code = child(run, more)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            # Nothing of the parent's is to be closed here.
            os._exit(code)
    return pid


def end(number: int, frame: FrameType | None) -> None:
    """Lets SIGTERM end this process as Ctrl-C does."""
    raise KeyboardInterrupt


def make(runs: list[Run], jobs: int, more: tuple[str, ...] = ()) -> int:
    """Makes these runs, `jobs` at a time, with more settings than theirs; returns how many failed."""
    waiting, running, failed = list(reversed(runs)), dict[int, Run](), 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop()
                running[fork(run, more)] = run
            pid, status = os.wait()
            run = running.pop(pid)
            failed += status != 0
            line = finished().get(run)
            said = (
                f"failed, see {run.folder}.log"
                if line is None
                else f"{line['final']:.3f} in {line['seconds']} s"
            )
            done = len(runs) - len(waiting) - len(running)
            print(f"[{done}/{len(runs)}] {run.kind} {run.name} {run.seed}: {said}", flush=True)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGTERM)
    return failed


def make_teacher() -> None:
    """Trains the teacher with grpo and a seed of its own, unless it is there."""
    exported = (
        f"trainer.save_freq={STEPS}",
        f"{ACTOR}.checkpoint.save_contents=[model, optimizer, extra, hf_model]",
    )
    there = TEACHER in finished() and (TEACHER.folder / f"global_step_{STEPS}").is_dir()
    if not there and make([TEACHER], 1, exported):
        raise SystemExit("on_policy_distillation has no teacher")


def median(values: list[float | None]) -> float:
    """Returns the lower median, so that it is one of the runs; None counts as never."""
    return statistics.median_low([math.inf if value is None else value for value in values])


def shown(values: list[float | None], digits: int) -> str:
    """Writes the seeds' numbers and their median as two cells; a dash is never."""
    words = [DASH if value is None else f"{value:.{digits}f}" for value in values]
    middle = median(values)
    return f"{', '.join(words)} | {DASH if middle == math.inf else f'{middle:.{digits}f}'}"


def rows(kind: str, lines: dict[Run, dict[str, Any]]) -> Iterator[str]:
    """Yields the table's rows of estimators or of losses; grpo's runs are vanilla's, too."""
    for name in names(kind):
        of = ("estimator", "grpo") if (kind, name) == ("loss", "vanilla") else (kind, name)
        seeds = [lines[run] for seed in SEEDS if (run := Run(*of, seed)) in lines]
        if seeds:
            final, reached = (
                shown([line["final"] for line in seeds], 2),
                shown([line["reached"] for line in seeds], 0),
            )
            yield f"| {name} | {final} | {reached} |"


def described(lines: dict[Run, dict[str, Any]]) -> str:
    """Says what was trained, how long, when and on what."""
    seconds, first = ([line[key] for line in lines.values()] for key in ("seconds", "first"))
    processor = f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"
    return (
        f"The quickstart's game with numbers from 1 to {HIGHEST} and {TURNS} guesses, one a turn: reward 1 for the "
        f"hidden number, else 0. Its Llama of two layers and 90,000 parameters, warmed up, begins at a mean reward "
        f"of {statistics.fmean(first):.2f}. {STEPS} steps of {TASKS} tasks × {GROUP} episodes with four updates each; "
        f"one learning rate, 5e-4, and the default settings for all but what is noted below. Seeds "
        f"{', '.join(map(str, SEEDS))}. Final: mean reward of the last {LAST} steps. To {GOAL}: the step at which the "
        f"mean reward of {SMOOTHED} steps first reached it, {DASH} if none did. {len(lines)} runs of "
        f"{min(seconds):.0f} to {max(seconds):.0f} s of CPU time, each on one thread of a {processor}, "
        f"{max(line['date'] for line in lines.values())}; `make learn-table` makes them again."
    )


def table(lines: dict[Run, dict[str, Any]]) -> str:
    """Writes the runs as Markdown: what they are, a table of estimators and one of losses, what was set otherwise."""
    parts = [textwrap.fill(described(lines), 120)]
    for kind, title in zip(
        KINDS, ("estimator, with the loss vanilla", "loss, with the estimator grpo"), strict=True
    ):
        head = f"| {title} | final reward, per seed | median | steps to {GOAL}, per seed | median |"
        parts.append("\n".join([head, "|---|---|---|---|---|", *rows(kind, lines)]))
    notes = [
        textwrap.fill(f"- {name}: {why}", 120, subsequent_indent="  ")
        for name, (_, why) in OVERRIDES.items()
    ]
    return "\n\n".join([*parts, "Set otherwise:", "\n".join(notes)])


def write_table(lines: dict[Run, dict[str, Any]]) -> None:
    """Puts the table between the markers of docs/algorithms.md, in the place of the one there."""
    if not lines:
        raise SystemExit(f"{FOLDER / 'runs.jsonl'} has no run with today's settings")
    before, begin, rest = PAGE.read_text().partition(MARKERS[0])
    _, end_marker, after = rest.partition(MARKERS[1])
    if not (begin and end_marker):
        raise SystemExit(f"{PAGE} must have the lines {MARKERS[0]} and {MARKERS[1]}")
    PAGE.write_text(f"{before}{begin}\n{table(lines)}\n{end_marker}{after}")


def main(argv: list[str]) -> int:
    """Makes the runs that are missing, then the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these estimators and losses, no table",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, help="with these seeds")
    parser.add_argument(
        "--table", action="store_true", help="write the table of the runs that are there"
    )
    args = parser.parse_args(argv)
    failed = 0
    if not args.table:
        signal.signal(signal.SIGTERM, end)
        torch.set_num_threads(1)
        for module in PRELOADED:
            importlib.import_module(module)
        with alone():
            prepare(FOLDER / "task", seed=0)
            there = finished()
            chosen = [
                run
                for run in all_runs()
                if run.seed in args.seeds and (not args.only or run.name in args.only)
            ]
            missing = [run for run in chosen if run not in there]
            if any(run.name == "on_policy_distillation" for run in missing):
                make_teacher()
            failed = make(missing, args.jobs)
    if args.table or not args.only:
        write_table({run: line for run, line in finished().items() if run in all_runs()})
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
