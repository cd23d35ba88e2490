"""Shows that every algorithm learns: `make learn-table` trains all estimators and losses.

Each advantage estimator is trained with the vanilla loss, each policy loss with grpo, with SEEDS
each, in the quickstart's game (smaller: three numbers, two guesses), on one thread a run, and the
table goes into docs/learning.md. Finished runs are not made again (scripts/learn_runs.py); after
a change of the code, delete outputs/learn_table/runs.jsonl.

    python scripts/learn_table.py --jobs 2                     # what is missing, then the table
    python scripts/learn_table.py --only gspo remax --seeds 0  # some of it, no table
    python scripts/learn_table.py --table                      # the table, of the runs there are
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import signal
import statistics
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# Before torch is imported: a run has one core.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from prepare_quickstart import prepare

from scripts.learn_runs import (
    DEVIATIONS,
    FOLDER,
    GOAL,
    GROUP,
    HIGHEST,
    KINDS,
    LAST,
    PROJECT,
    RUNS,
    SEEDS,
    SMOOTHED,
    STEPS,
    TASKS,
    TURNS,
    Run,
    all_runs,
    alone,
    finished,
    make,
    make_teacher,
    names,
)

PAGE = PROJECT / "docs/learning.md"
BEGIN = "<!-- learn-table -->"
END = "<!-- /learn-table -->"
PAGE_WIDTH = 100
# The head of the table's first column, for each kind of run.
TITLES = {
    "estimator": "estimator, with the loss vanilla",
    "loss": "loss, with the estimator grpo",
}
# Stands for a number that there is not.
DASH = "–"
# The modules of a run, imported before the forks, so that each starts at once.
PRELOADED = (
    "training.agent_trainer",
    "workers.fsdp_workers",
    "workers.hf_rollout",
    "transformers.models.llama",
)
# A run's line in runs.jsonl.
Lines = dict[Run, dict[str, Any]]


def cells(values: list[float | None], digits: int) -> str:
    """Writes the seeds' numbers and their lower median as two cells; None is never, a dash.

    The lower median is one of the runs.
    """
    words = [DASH if value is None else f"{value:.{digits}f}" for value in values]
    median = statistics.median_low([math.inf if value is None else value for value in values])
    median_word = DASH if median == math.inf else f"{median:.{digits}f}"
    return f"{', '.join(words)} | {median_word}"


def rows(kind: str, lines: Lines) -> Iterator[str]:
    """Yields the table's rows of estimators or of losses."""
    for name in names(kind):
        seeds = [lines[run] for run in _runs_of(kind, name) if run in lines]
        if seeds:
            final = cells([line["final"] for line in seeds], 2)
            reached = cells([line["reached"] for line in seeds], 0)
            yield f"| {name} | {final} | {reached} |"


def _runs_of(kind: str, name: str) -> list[Run]:
    """Lists the runs of an algorithm; grpo's are the vanilla loss's, too."""
    if (kind, name) == ("loss", "vanilla"):
        kind = "estimator"
        name = "grpo"
    return [Run(kind, name, seed) for seed in SEEDS]


def description(lines: Lines) -> str:
    """Describes what was trained, how long, when and on what."""
    seconds = [line["seconds"] for line in lines.values()]
    first = [line["first"] for line in lines.values()]
    date = max(line["date"] for line in lines.values())
    processor = f"{platform.machine()} CPU ({torch.backends.cpu.get_cpu_capability()})"
    return (
        f"The quickstart's game with numbers from 1 to {HIGHEST} and {TURNS} guesses, "
        "one a turn: reward 1 for the hidden number, else 0. "
        "Its Llama of two layers and 90,000 parameters, warmed up, begins at a mean reward "
        f"of {statistics.fmean(first):.2f}. "
        f"{STEPS} steps of {TASKS} tasks × {GROUP} episodes with four updates each; "
        "one learning rate, 5e-4, and the default settings for all but what is noted below. "
        f"Seeds {', '.join(map(str, SEEDS))}. "
        f"Final: mean reward of the last {LAST} steps. "
        f"To {GOAL}: the step at which the mean reward of {SMOOTHED} steps first reached it, "
        f"{DASH} if none did. "
        f"{len(lines)} runs of {min(seconds):.0f} to {max(seconds):.0f} s of CPU time, "
        f"each on one thread of a {processor}, {date}; `make learn-table` makes them again."
    )


def table(lines: Lines) -> str:
    """Writes the runs as Markdown: what they are, both tables, and what was set otherwise."""
    parts = [textwrap.fill(description(lines), PAGE_WIDTH)]
    for kind in KINDS:
        head = (
            f"| {TITLES[kind]} | final reward, per seed | median "
            f"| steps to {GOAL}, per seed | median |"
        )
        parts.append("\n".join([head, "|---|---|---|---|---|", *rows(kind, lines)]))
    parts.append("Set otherwise:")
    notes = []
    for name, deviation in DEVIATIONS.items():
        note = f"- {name}: {deviation.reason}"
        notes.append(textwrap.fill(note, PAGE_WIDTH, subsequent_indent="  "))
    parts.append("\n".join(notes))
    return "\n\n".join(parts)


def write_table(lines: Lines) -> None:
    """Puts the table between the markers of docs/learning.md, in the place of the one there."""
    if not lines:
        raise SystemExit(f"{RUNS} has no run with today's settings")
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE} must have the lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{begin}\n{table(lines)}\n{end}{after}")


def make_missing(chosen: list[Run], jobs: int) -> int:
    """Makes those of the runs that are not there; returns how many failed."""
    signal.signal(signal.SIGTERM, _interrupt)
    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    with alone():
        prepare(FOLDER / "task", seed=0)
        there = finished()
        missing = [run for run in chosen if run not in there]
        if any(run.name == "on_policy_distillation" for run in missing):
            make_teacher()
        return make(missing, jobs)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Lets SIGTERM end this process as Ctrl-C does."""
    raise KeyboardInterrupt


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
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
    return parser


def main(argv: list[str]) -> int:
    """Makes the runs that are missing, then the table; returns the exit code."""
    args = make_parser().parse_args(argv)
    failed = 0
    if not args.table:
        chosen = [run for run in all_runs() if run.seed in args.seeds]
        if args.only:
            chosen = [run for run in chosen if run.name in args.only]
        failed = make_missing(chosen, args.jobs)
    if args.table or not args.only:
        runs = set(all_runs())
        write_table({run: line for run, line in finished().items() if run in runs})
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
