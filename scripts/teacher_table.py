"""Measures what a teacher that was told more is worth: configs/codes.yaml in several ways.

    python examples/prepare_codes.py
    python scripts/teacher_table.py                 # every way, three seeds; then the table
    python scripts/teacher_table.py --seeds 0       # one seed
    python scripts/teacher_table.py --table         # the table, of the runs there are
    python scripts/teacher_table.py key=value …     # settings of every run

Runs are made one after another in OUT/WAY-SEED. One that was broken off goes on from its last
checkpoint when the script is started again, and one that has ended is not made again. The table
says, as means over the seeds with the lowest and the highest: the reward of training over the first
ten steps, over those half way, and over the last ten, and how far the policy is from the teacher at
the end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.run.metrics_file import read_records

PROJECT = Path(__file__).resolve().parent.parent
MODEL = "outputs/codes/model"
STEPS = 60
SEEDS = (0, 1, 2)
# Steps over which a run's numbers are averaged.
WINDOW = 10
WAYS: dict[str, tuple[str, ...]] = {
    "grpo alone": ("teacher.model=null",),
    "distillation alone": ("teacher.model={model}", "teacher.reward_coef=0"),
    "both": ("teacher.model={model}",),
    "both, failures alone": ("teacher.model={model}", "teacher.where=failed"),
    "both, the teacher the policy": ("teacher.model=policy",),
}
HEADINGS = ("", "seeds", "reward at first", "half way", "at last", "KL to the teacher at last")
REWARD = "critic/rewards/mean"
Record = Mapping[str, Any]


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Returns the folder of a run."""
    return out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"


def records_of(folder: Path) -> list[Record]:
    """Reads a run's metrics of its steps; none where it has not begun."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    return [record for record in read_records(file) if REWARD in record]


def steps_made(folder: Path) -> int:
    """Returns the number of a run's last step."""
    return max((int(record["step"]) for record in records_of(folder)), default=0)


def make(folder: Path, way: str, seed: int, args: argparse.Namespace, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    argv = [
        sys.executable,
        str(PROJECT / "main.py"),
        str(PROJECT / "configs/codes.yaml"),
        f"actor_rollout_ref.model.path={args.model}",
        *(word.format(model=args.model) for word in WAYS[way]),
        f"data.seed={seed}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={args.steps}",
        "trainer.save_freq=20",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.logger=[file]",
        "records.keep_gib=0",
        *words,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "ab") as log:
        done = subprocess.run(
            argv, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
        )
    return done.returncode


def numbers_of(records: Sequence[Record], steps: int) -> list[float]:
    """Returns a run's row of the table."""
    half = steps // 2
    windows = [records[:WINDOW], records[half - WINDOW // 2 :][:WINDOW], records[-WINDOW:]]
    rewards = [statistics.mean(record[REWARD] for record in window) for window in windows]
    kls = [record["teacher/kl"] for record in windows[-1] if "teacher/kl" in record]
    return [*rewards, statistics.mean(kls) if kls else float("nan")]


def shown(values: Sequence[float]) -> str:
    """Writes a mean with the lowest and the highest of several values."""
    if any(value != value for value in values):
        return "–"
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.2f}–{max(values):.2f})"


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
    for way in WAYS:
        runs = [records_of(folder_of(out, way, seed)) for seed in seeds]
        rows = [numbers_of(run, steps) for run in runs if run and int(run[-1]["step"]) >= steps]
        if rows:
            cells = [shown(values) for values in zip(*rows, strict=True)]
            lines.append(f"| {' | '.join([way, str(len(rows)), *cells])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/teacher"))
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="make no run")
    args, words = parser.parse_known_args(argv)
    wrong = [word for word in words if "=" not in word or word.startswith("-")]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    # A seed at a time, so that there is something of every way where the time runs out.
    for seed in args.seeds if not args.table else ():
        for way in WAYS:
            folder = folder_of(args.out, way, seed)
            if steps_made(folder) >= args.steps:
                continue
            exit_code = make(folder, way, seed, args, words)
            print(f"{way}, seed {seed}: exit code {exit_code}", flush=True)
            if exit_code:
                print(f"see {folder}/log.txt", file=sys.stderr)
                return exit_code
    print(table(args.out, args.seeds, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
