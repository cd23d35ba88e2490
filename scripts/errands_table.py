"""Measures what branches are worth in a game that tells estimators apart: errands, then a door.

    python scripts/errands_table.py                # every arm, rate and seed; then the table
    python scripts/errands_table.py --seeds 0 1 2
    python scripts/errands_table.py --table        # the table, of the runs there are

The game is played and learnt as a table of states (scripts/errands_tabular.py). All arms may sample
the same number of turns, those of continuations that nobody trains on included, and each has its
best of three rates: the one with the highest median over the seeds. A run that has ended is a line
in OUT/runs.jsonl and is not made again. Invariant: a line is written whole or not at all, and one
that was cut is made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from scripts.errands_tabular import ARMS, TURNS, Game, Outcome, train

BUDGET = 100_000
RATES = (0.1, 0.3, 1.0)
SEEDS = tuple(range(9))
# The turn at which the door is taken: the last one, and one that more luck follows.
DECISIONS = (TURNS - 1, 4)
SIGMA = 8.0


@dataclass(frozen=True)
class Run:
    """Names a run, as its line does."""

    decision: int
    arm: str
    rate: float
    seed: int
    budget: int
    sigma: float

    def make(self) -> Outcome:
        """Makes it."""
        game = Game(decision=self.decision, sigma=self.sigma)
        return train(game, ARMS[self.arm], budget=self.budget, rate=self.rate, seed=self.seed)


Outcomes = dict[Run, Outcome]


def read(file: Path) -> Outcomes:
    """Reads the runs that have ended; a line that was cut is none."""
    found: Outcomes = {}
    if not file.is_file():
        return found
    for line in file.read_text().splitlines():
        try:
            entry = json.loads(line)
            found[Run(**entry["run"])] = Outcome(**entry["outcome"])
        except (json.JSONDecodeError, KeyError, TypeError):
            print(f"{file}: a line is no run, and is made again: {line[:60]}", file=sys.stderr)
    return found


def write(file: Path, run: Run, outcome: Outcome) -> None:
    """Adds a line; one that was cut before it is ended first."""
    text = json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n"
    if file.is_file() and not file.read_bytes().endswith(b"\n"):
        text = "\n" + text
    with file.open("a") as lines:
        lines.write(text)


def runs(seeds: Sequence[int], budget: int, sigma: float) -> Iterator[Run]:
    """Lists the runs, a seed at a time, so that there is something of every arm early."""
    for seed in seeds:
        for decision in DECISIONS:
            for arm in ARMS:
                for rate in RATES:
                    yield Run(decision, arm, rate, seed, budget, sigma)


def best_rate(made: Outcomes, decision: int, arm: str) -> list[Outcome]:
    """Returns the outcomes of an arm's best rate, by the median of their success."""
    by_rate: list[list[Outcome]] = []
    for rate in RATES:
        by_rate.append(
            [
                outcome
                for run, outcome in made.items()
                if (run.decision, run.arm, run.rate) == (decision, arm, rate)
            ]
        )
    return max(by_rate, key=lambda outcomes: median_success(outcomes))


def median_success(outcomes: Sequence[Outcome]) -> float:
    """Returns the median success; -1 where there is no run."""
    return statistics.median(outcome.success for outcome in outcomes) if outcomes else -1.0


def shown(outcomes: Sequence[Outcome]) -> str:
    """Writes the median success with the lowest and the highest."""
    if not outcomes:
        return "-"
    each = [outcome.success for outcome in outcomes]
    return f"{median_success(outcomes):.2f} ({min(each):.2f}–{max(each):.2f})"


def turns_to_goal(outcomes: Sequence[Outcome]) -> str:
    """Writes the median of the turns to 0.9, where more than half of the runs came there."""
    reached = [each.to_goal for each in outcomes if each.to_goal is not None]
    if 2 * len(reached) <= len(outcomes):
        return "-"
    never = max(each.sampled for each in outcomes)
    all_runs = reached + [never] * (len(outcomes) - len(reached))
    return f"{statistics.median(all_runs):,.0f}"


def table(made: Outcomes) -> str:
    """Writes the table as Markdown."""
    heads = ["arm"]
    for decision in DECISIONS:
        heads += [f"door at turn {decision}", "turns to 0.9"]
    lines = [f"| {' | '.join([*heads, 'updates'])} |", f"|{'---|' * (len(heads) + 1)}"]
    for arm in ARMS:
        cells = [arm]
        for decision in DECISIONS:
            outcomes = best_rate(made, decision, arm)
            cells += [shown(outcomes), turns_to_goal(outcomes)]
        updates = best_rate(made, DECISIONS[0], arm)
        cells.append(
            str(int(statistics.median(each.steps for each in updates))) if updates else "-"
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/errands_table"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--budget", type=int, default=BUDGET, help="sampled turns of a run")
    parser.add_argument("--sigma", type=float, default=SIGMA)
    parser.add_argument("--table", action="store_true", help="make no run")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "runs.jsonl"
    made = read(file)
    wanted = list(runs(args.seeds, args.budget, args.sigma))
    for run in wanted if not args.table else ():
        if run in made:
            continue
        made[run] = run.make()
        write(file, run, made[run])
        print(
            f"{run.arm}, door at turn {run.decision}, rate {run.rate}, seed {run.seed}: "
            f"{made[run].success:.2f}",
            flush=True,
        )
    chosen = set(wanted)
    print(table({run: outcome for run, outcome in made.items() if run in chosen}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
