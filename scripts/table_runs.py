"""Makes the runs that a table compares, and reads what they wrote.

A run is one of a way (settings) and a seed, in the folder OUT/WAY-SEED. One that was broken off
goes on from its last checkpoint when its script is started again, and one that has ended is not
made again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.run.metrics_file import read_records

PROJECT = Path(__file__).resolve().parent.parent
# Of every run of a table; words of its own come behind them.
SETTINGS = (
    "trainer.save_freq=10",
    "trainer.max_actor_ckpt_to_keep=1",
    "trainer.logger=[file]",
    "records.keep_gib=0",
)
Record = Mapping[str, Any]


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Returns the folder of a run."""
    name = way.replace(", ", "-").replace(" ", "-")
    return out.absolute() / f"{name}-{seed}"


def records_of(folder: Path) -> list[Record]:
    """Reads a run's metrics, a record a step; none where it has not begun."""
    file = folder / "metrics.jsonl"
    return list(read_records(file)) if file.is_file() else []


def steps_made(folder: Path) -> int:
    """Returns the number of a run's last step; 0 where it has not begun."""
    return max((int(record["step"]) for record in records_of(folder)), default=0)


def rewards_of(records: Iterable[Record]) -> dict[int, float]:
    """Returns the mean rewards of a run's validations by their steps."""
    rewards = {}
    for record in records:
        for name, value in record.items():
            if name.startswith("val-core/") and name.endswith("reward/mean@1"):
                rewards[int(record["step"])] = float(value)
    return rewards


def run_main(folder: Path, config: str, words: Sequence[str], **variables: str) -> int:
    """Makes a run on one thread, or goes on with it; returns its exit code.

    Args:
        folder: of the run, whose log.txt gets what it prints.
        config: its file's name in configs/.
        words: further words of the command line.
        variables: of its environment.
    """
    argv = [
        sys.executable,
        str(PROJECT / "main.py"),
        str(PROJECT / "configs" / config),
        f"trainer.default_local_dir={folder}",
        *SETTINGS,
        *words,
    ]
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with open(folder / "log.txt", "ab") as log:
        done = subprocess.run(argv, stdout=log, stderr=log, env=environment, check=False)
    return done.returncode


def arguments(
    argv: Sequence[str] | None,
    description: str | None,
    ways: Sequence[str],
    **defaults: Any,
) -> tuple[argparse.Namespace, list[str]]:
    """Reads a script's arguments; what it does not know must be settings of the runs.

    Args:
        ways: the names that `--ways` allows, all of which are its default.
        defaults: of `out` (a folder), `seeds` and `steps`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(defaults["out"]))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(defaults["seeds"]))
    parser.add_argument("--steps", type=int, default=defaults["steps"])
    parser.add_argument("--ways", nargs="+", choices=ways, default=list(ways))
    parser.add_argument("--table", action="store_true", help="make no run")
    args, words = parser.parse_known_args(argv)
    wrong = [word for word in words if "=" not in word or word.startswith("-")]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    return args, words


def make_all(
    args: argparse.Namespace,
    make: Callable[[Path, str, int], int],
    has_ended: Callable[[Path, int], bool] | None = None,
) -> int:
    """Makes the runs that have not ended; returns the exit code of the first that failed, else 0.

    Args:
        make: makes the run of a folder, a way and a seed, and returns its exit code.
        has_ended: says whether the run of a folder and a seed has; by default, by its steps.
    """
    # A seed at a time, so that there is something of every way where the time runs out.
    for seed in args.seeds if not args.table else ():
        for way in args.ways:
            folder = folder_of(args.out, way, seed)
            is_made = has_ended or (lambda folder, seed: steps_made(folder) >= args.steps)
            if is_made(folder, seed):
                continue
            exit_code = make(folder, way, seed)
            print(f"{way}, seed {seed}: exit code {exit_code}", flush=True)
            if exit_code:
                print(f"see {folder}/log.txt", file=sys.stderr)
                return exit_code
    return 0


def ended_runs(out: Path, way: str, seeds: Sequence[int], steps: int) -> list[list[Record]]:
    """Reads the records of those of a way's runs that have made all steps."""
    runs = [records_of(folder_of(out, way, seed)) for seed in seeds]
    return [records for records in runs if records and int(records[-1]["step"]) >= steps]


def shown(values: Sequence[float], digits: int = 2) -> str:
    """Writes a mean with the lowest and the highest of several values; a dash where one is NaN."""
    if any(value != value for value in values):
        return "–"
    mean, low, high = (
        f"{value:,.{digits}f}" for value in (statistics.mean(values), min(values), max(values))
    )
    return mean if low == high else f"{mean} ({low}–{high})"


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Writes a table as Markdown."""
    lines = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)
