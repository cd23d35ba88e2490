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
    rewards_of,
    run_main,
    shown,
)

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


def make(folder: Path, way: str, seed: int, steps: int, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    own = [
        f"agent.environment.kwargs.credit={way}",
        f"data.seed={seed}",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=20",
    ]
    return run_main(folder, "pages.yaml", [*own, *words])


def numbers_of(records: Sequence[Record]) -> list[float]:
    """Returns a run's row of the table."""
    rewards = list(rewards_of(records).values())
    steps = [record for record in records if "agent/info/won/mean" in record]
    won = [record["agent/info/won/mean"] for record in steps]
    return [rewards[0], rewards[-1], won[0], statistics.mean(won[-LAST:])]


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    rows = []
    for way, told in WAYS.items():
        numbers = [numbers_of(run) for run in ended_runs(out, way, seeds, steps)]
        if numbers:
            cells = [shown(values) for values in zip(*numbers, strict=True)]
            rows.append([told, str(len(numbers)), *cells])
    return markdown(HEADINGS, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    args, words = arguments(
        argv, __doc__, list(WAYS), out="outputs/pages_table", seeds=SEEDS, steps=STEPS
    )

    def make_one(folder: Path, way: str, seed: int) -> int:
        return make(folder, way, seed, args.steps, words)

    exit_code = make_all(args, make_one)
    if exit_code == 0:
        print(table(args.out, args.seeds, args.steps))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
