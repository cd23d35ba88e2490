"""Measures what contexts are worth on a game that is longer than one: configs/clues.yaml.

    python examples/prepare_clues.py
    python scripts/contexts_table.py                 # every way, three seeds; then the table
    python scripts/contexts_table.py --seeds 0       # one seed
    python scripts/contexts_table.py --table         # the table, of the runs there are
    python scripts/contexts_table.py key=value …     # settings of every run

Runs are made one after another in OUT/WAY-SEED. One that was broken off goes on from its last
checkpoint when the script is started again, and one that has ended is not made again. The table
says, as means over the seeds with the lowest and the highest: the reward of validation before and
behind the last step (greedy, the same tasks every time), the share of episodes that overflowed in
the last steps, contexts and sampled tokens of an episode, and the tokens that the run sampled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.run.metrics_file import read_records

PROJECT = Path(__file__).resolve().parent.parent
STEPS = 60
SEEDS = (0, 1, 2)
# Steps at the end over which a run's numbers are averaged.
LAST = 10
WAYS: dict[str, tuple[str, ...]] = {
    "keep": ("agent.context=keep",),
    "last_turns": ("agent.context=last_turns", "context.keep_turns=1"),
    "summarise, masked": ("agent.context=summarise", "context.train_summaries=false"),
    "summarise, trained": ("agent.context=summarise", "context.train_summaries=true"),
}
HEADINGS = (
    "`agent.context`",
    "seeds",
    "reward at first",
    "reward at last",
    "overflows",
    "contexts",
    "sampled tokens of an episode",
    "of the run",
)
Record = Mapping[str, Any]


def folder_of(out: Path, way: str, seed: int) -> Path:
    """Returns the folder of a run."""
    return out / f"{way.replace(', ', '-')}-{seed}"


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
        str(PROJECT / "configs/clues.yaml"),
        *WAYS[way],
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


def rewards_of(records: Sequence[Record]) -> list[float]:
    """Lists the rewards of a run's validations."""
    rewards = []
    for record in records:
        named = [value for name, value in record.items() if is_reward(name)]
        rewards += named[:1]
    return rewards


def is_reward(name: str) -> bool:
    """Checks whether a metric is the mean reward of a validation."""
    return name.startswith("val-core/") and name.endswith("reward/mean@1")


def sampled_tokens(record: Record) -> float:
    """Counts the tokens that a step's episodes sampled, those of masked summaries too."""
    summaries = record.get("context/summaries", 0) * record.get("context/summary_tokens/mean", 0)
    share = record.get("context/summary_tokens/share", 0)
    if share:
        return summaries / share
    return float(record["actor/given_tokens"])


def numbers_of(records: Sequence[Record]) -> list[float]:
    """Returns a run's row of the table."""
    steps = [record for record in records if "agent/episodes" in record]
    last = steps[-LAST:]
    rewards = rewards_of(records)

    def mean(value: Callable[[Record], float]) -> float:
        return statistics.mean(value(record) for record in last)

    return [
        rewards[0],
        rewards[-1],
        mean(lambda record: record["agent/ending/overflow"] / record["agent/episodes"]),
        mean(lambda record: record.get("context/per_episode/mean", 1.0)),
        mean(lambda record: sampled_tokens(record) / record["agent/episodes"]),
        sum(sampled_tokens(record) for record in steps),
    ]


def shown(values: Sequence[float], digits: int) -> str:
    """Writes a mean with the lowest and the highest of several values."""
    mean = f"{statistics.mean(values):,.{digits}f}"
    if len(values) == 1 or min(values) == max(values):
        return mean
    return f"{mean} ({min(values):,.{digits}f}–{max(values):,.{digits}f})"


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    lines = [
        f"| {' | '.join(HEADINGS)} |",
        f"|{'---|' * len(HEADINGS)}",
    ]
    for way in WAYS:
        runs = [records_of(folder_of(out, way, seed)) for seed in seeds]
        rows = [numbers_of(run) for run in runs if run and int(run[-1]["step"]) >= steps]
        if not rows:
            continue
        cells = [
            shown(values, digits)
            for values, digits in zip(zip(*rows, strict=True), (2, 2, 2, 1, 1, 0), strict=True)
        ]
        name, _, which = way.partition(", ")
        told = f"`{name}`, {which}" if which else f"`{name}`"
        lines.append(f"| {' | '.join([told, str(len(rows)), *cells])} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/contexts"))
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
