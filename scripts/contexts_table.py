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

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.table_runs import (
    Record,
    arguments,
    ended_runs,
    make_all,
    markdown,
    rewards_of,
    run_main,
    shown,
)

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
# Behind the point, of the columns of numbers.
DIGITS = (2, 2, 2, 1, 1, 0)


def make(folder: Path, way: str, seed: int, steps: int, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    own = [
        *WAYS[way],
        f"data.seed={seed}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=20",
    ]
    return run_main(folder, "clues.yaml", [*own, *words])


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
    rewards = list(rewards_of(records).values())

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


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    rows = []
    for way in WAYS:
        numbers = [numbers_of(run) for run in ended_runs(out, way, seeds, steps)]
        if not numbers:
            continue
        columns = zip(zip(*numbers, strict=True), DIGITS, strict=True)
        cells = [shown(values, digits) for values, digits in columns]
        name, _, which = way.partition(", ")
        told = f"`{name}`, {which}" if which else f"`{name}`"
        rows.append([told, str(len(numbers)), *cells])
    return markdown(HEADINGS, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    args, words = arguments(
        argv, __doc__, list(WAYS), out="outputs/contexts", seeds=SEEDS, steps=STEPS
    )

    def make_one(folder: Path, way: str, seed: int) -> int:
        return make(folder, way, seed, args.steps, words)

    exit_code = make_all(args, make_one)
    if exit_code == 0:
        print(table(args.out, args.seeds, args.steps))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
