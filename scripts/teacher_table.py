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

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.table_runs import (
    Record,
    arguments,
    ended_runs,
    make_all,
    markdown,
    run_main,
    shown,
)

# The policy at first, and the teacher.
MODEL = "outputs/codes/model"
STEPS = 60
SEEDS = (0, 1, 2)
# Steps over which a run's numbers are averaged.
WINDOW = 10
WAYS: dict[str, tuple[str, ...]] = {
    "grpo alone": ("teacher.model=null",),
    "distillation alone": (f"teacher.model={MODEL}", "teacher.reward_coef=0"),
    "both": (f"teacher.model={MODEL}",),
    "both, failures alone": (f"teacher.model={MODEL}", "teacher.where=failed"),
    "both, the teacher the policy": ("teacher.model=policy",),
    "both, the teacher its moving average": ("teacher.model=ema",),
}
HEADINGS = ("", "seeds", "reward at first", "half way", "at last", "KL to the teacher at last")
REWARD = "critic/rewards/mean"


def make(folder: Path, way: str, seed: int, steps: int, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    own = [
        *WAYS[way],
        f"data.seed={seed}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    ]
    return run_main(folder, "codes.yaml", [*own, *words])


def numbers_of(records: Sequence[Record], steps: int) -> list[float]:
    """Returns a run's row of the table."""
    records = [record for record in records if REWARD in record]
    half = steps // 2
    windows = [records[:WINDOW], records[half - WINDOW // 2 :][:WINDOW], records[-WINDOW:]]
    rewards = [statistics.mean(record[REWARD] for record in window) for window in windows]
    kls = [record["teacher/kl"] for record in windows[-1] if "teacher/kl" in record]
    return [*rewards, statistics.mean(kls) if kls else float("nan")]


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    rows = []
    for way in WAYS:
        numbers = [numbers_of(run, steps) for run in ended_runs(out, way, seeds, steps)]
        if numbers:
            cells = [shown(values) for values in zip(*numbers, strict=True)]
            rows.append([way, str(len(numbers)), *cells])
    return markdown(HEADINGS, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    args, words = arguments(
        argv, __doc__, list(WAYS), out="outputs/teacher", seeds=SEEDS, steps=STEPS
    )

    def make_one(folder: Path, way: str, seed: int) -> int:
        return make(folder, way, seed, args.steps, words)

    exit_code = make_all(args, make_one)
    if exit_code == 0:
        print(table(args.out, args.seeds, args.steps))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
