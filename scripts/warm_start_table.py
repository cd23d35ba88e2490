"""Measures what twenty scripted episodes are worth on a sparse game: configs/sums.yaml.

    python examples/prepare_sums.py
    python scripts/warm_start_table.py                 # every way, three seeds; then the table
    python scripts/warm_start_table.py --seeds 0       # one seed
    python scripts/warm_start_table.py --table         # the table, of the runs there are
    python scripts/warm_start_table.py key=value …     # settings of every run

Runs are made one after another in OUT/WAY-SEED. One that was broken off goes on from its last
checkpoint when the script is started again, and one that has ended is not made again. The table is
the curve of each way: the reward of validation (greedy, the same games every time) by step, as
means over the seeds with the lowest and the highest.
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
CONFIG = PROJECT / "configs/sums.yaml"
STEPS = 80
SEEDS = (0, 1, 2)
EVERY = 20
# The way whose model learns the episodes before its run.
FIRST = "episodes first, then GRPO"
WAYS: dict[str, tuple[str, ...]] = {
    "GRPO alone": (),
    FIRST: (),
    "GRPO with the episodes beside": ("sft.loss_coef=0.1",),
}
Record = Mapping[str, Any]


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Returns the folder of a run."""
    return out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"


def records_of(folder: Path) -> list[Record]:
    """Reads a run's metrics, a record a step; none where it has not begun."""
    file = folder / "metrics.jsonl"
    return list(read_records(file)) if file.is_file() else []


def steps_made(folder: Path) -> int:
    """Returns the number of a run's last step."""
    return max((int(record["step"]) for record in records_of(folder)), default=0)


def run(folder: Path, seed: int, *words: str) -> int:
    """Runs main.py, whose words are added to the log in the folder; returns its exit code."""
    argv = [
        sys.executable,
        str(PROJECT / "main.py"),
        str(CONFIG),
        f"data.seed={seed}",
        f"trainer.default_local_dir={folder}",
        f"sft.folder={folder}/sft",
        "trainer.save_freq=10",
        f"trainer.test_freq={EVERY}",
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


def make(folder: Path, way: str, seed: int, steps: int, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    model = folder / "sft" / "model"
    own = [*WAYS[way], f"trainer.total_training_steps={steps}"]
    if way == FIRST:
        if not model.exists():
            exit_code = run(folder, seed, *words, "--sft")
            if exit_code:
                return exit_code
        own.append(f"actor_rollout_ref.model.path={model}")
    return run(folder, seed, *words, *own)


def rewards_of(records: Sequence[Record]) -> dict[int, float]:
    """Returns the rewards of a run's validations by their steps."""
    rewards = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("val-core/") and name.endswith("reward/mean@1"):
                rewards[int(record["step"])] = float(value)
    return rewards


def shown(values: Sequence[float]) -> str:
    """Writes a mean with the lowest and the highest of several values."""
    mean = f"{statistics.mean(values):.2f}"
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return mean if low == high else f"{mean} ({low}–{high})"


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    marks = list(range(0, steps + 1, EVERY))
    headings = ["way", "seeds", *(f"step {mark}" for mark in marks)]
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    for way in WAYS:
        folders = [folder_of(out, way, seed) for seed in seeds]
        ended = [folder for folder in folders if steps_made(folder) >= steps]
        if not ended:
            continue
        curves = [rewards_of(records_of(folder)) for folder in ended]
        cells = [shown([curve[mark] for curve in curves]) for mark in marks]
        lines.append(f"| {' | '.join([way, str(len(ended)), *cells])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/warm_start"))
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
            folder = folder_of(args.out.absolute(), way, seed)
            if steps_made(folder) >= args.steps:
                continue
            exit_code = make(folder, way, seed, args.steps, words)
            print(f"{way}, seed {seed}: exit code {exit_code}", flush=True)
            if exit_code:
                print(f"see {folder}/log.txt", file=sys.stderr)
                return exit_code
    print(table(args.out.absolute(), args.seeds, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
