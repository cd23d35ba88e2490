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

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.table_runs import (
    arguments,
    ended_runs,
    make_all,
    markdown,
    rewards_of,
    run_main,
    shown,
)

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


def run(folder: Path, seed: int, *words: str) -> int:
    """Makes a run, of SFT or of GRPO; returns its exit code."""
    own = [f"data.seed={seed}", f"sft.folder={folder}/sft", f"trainer.test_freq={EVERY}"]
    return run_main(folder, "sums.yaml", [*own, *words])


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


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    marks = list(range(0, steps + 1, EVERY))
    rows = []
    for way in WAYS:
        curves = [rewards_of(records) for records in ended_runs(out, way, seeds, steps)]
        if curves:
            cells = [shown([curve[mark] for curve in curves]) for mark in marks]
            rows.append([way, str(len(curves)), *cells])
    return markdown(["way", "seeds", *(f"step {mark}" for mark in marks)], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    args, words = arguments(
        argv, __doc__, list(WAYS), out="outputs/warm_start", seeds=SEEDS, steps=STEPS
    )

    def make_one(folder: Path, way: str, seed: int) -> int:
        return make(folder, way, seed, args.steps, words)

    exit_code = make_all(args, make_one)
    if exit_code == 0:
        print(table(args.out, args.seeds, args.steps))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
