"""Measures what it is worth to train sub-agents, on a game that is played with them.

    python examples/prepare_pages.py
    python scripts/policy_calls_table.py                 # every way, three seeds; then the table
    python scripts/policy_calls_table.py --seeds 0       # one seed
    python scripts/policy_calls_table.py --table         # the table, of the runs there are
    python scripts/policy_calls_table.py key=value …     # settings of every run

The game is examples/pages_game.py, the runs are those of configs/pages.yaml, made one after another
in OUT/WAY-SEED. One that was broken off goes on from its last checkpoint when the script is started
again, and one that has ended is not made again. The table says, as means over the seeds with the
lowest and the highest: the reward of validation before and behind the last step (greedy, the same
tasks every time), and the share of games that were won in the first step and in the last ones
(sampled).
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
STEPS = 40
SEEDS = (0, 1, 2)
# Steps at the end over which a run's numbers are averaged.
LAST = 5
# What a reader's answer earns, by how the table calls it.
WAYS = {
    "none": "nothing: they are not trained on",
    "episode": "what the episode earns",
    "own": "1 where they are right of their page",
}
HEADINGS = (
    "a reader's answer earns",
    "seeds",
    "reward at first",
    "reward at last",
    "won at first, sampled",
    "won at last, sampled",
)
Record = Mapping[str, Any]


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Returns the folder of a run."""
    return out / f"{way}-{seed}"


def records_of(folder: Path) -> list[Record]:
    """Reads a run's metrics, a record a step; none where it has not begun."""
    file = folder / "metrics.jsonl"
    return list(read_records(file)) if file.is_file() else []


def steps_made(folder: Path) -> int:
    """Returns the number of a run's last step."""
    return max((int(record["step"]) for record in records_of(folder)), default=0)


def make(folder: Path, way: str, seed: int, steps: int, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    argv = [
        sys.executable,
        str(PROJECT / "main.py"),
        str(PROJECT / "configs/pages.yaml"),
        f"agent.environment.kwargs.credit={way}",
        f"data.seed={seed}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=10",
        "trainer.test_freq=20",
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


def validations_of(records: Sequence[Record]) -> list[float]:
    """Lists the rewards of a run's validations."""
    rewards = []
    for record in records:
        named = [value for name, value in record.items() if is_reward(name)]
        rewards += named[:1]
    return rewards


def is_reward(name: str) -> bool:
    """Checks whether a metric is the mean reward of a validation."""
    return name.startswith("val-core/") and name.endswith("reward/mean@1")


def numbers_of(records: Sequence[Record]) -> list[float]:
    """Returns a run's row of the table."""
    rewards = validations_of(records)
    steps = [record for record in records if "agent/info/won/mean" in record]
    won = [record["agent/info/won/mean"] for record in steps]
    return [rewards[0], rewards[-1], won[0], statistics.mean(won[-LAST:])]


def shown(values: Sequence[float]) -> str:
    """Writes a mean with the lowest and the highest of several values."""
    mean = f"{statistics.mean(values):.2f}"
    if len(values) == 1 or min(values) == max(values):
        return mean
    return f"{mean} ({min(values):.2f}–{max(values):.2f})"


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    lines = [
        f"| {' | '.join(HEADINGS)} |",
        f"|{'---|' * len(HEADINGS)}",
    ]
    for way, told in WAYS.items():
        runs = [records_of(folder_of(out, way, seed)) for seed in seeds]
        rows = [numbers_of(run) for run in runs if run and int(run[-1]["step"]) >= steps]
        if not rows:
            continue
        cells = [shown(values) for values in zip(*rows, strict=True)]
        lines.append(f"| {' | '.join([told, str(len(rows)), *cells])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/pages_table"))
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
            exit_code = make(folder, way, seed, args.steps, words)
            print(f"{way}, seed {seed}: exit code {exit_code}", flush=True)
            if exit_code:
                print(f"see {folder}/log.txt", file=sys.stderr)
                return exit_code
    print(table(args.out, args.seeds, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
