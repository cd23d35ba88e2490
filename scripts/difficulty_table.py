"""Measures what the sampler `difficulty` is worth on a mixture of tasks: configs/mixed.yaml.

    python examples/prepare_mixed.py
    python scripts/difficulty_table.py               # every way, three seeds; then the table
    python scripts/difficulty_table.py --seeds 1     # one seed
    python scripts/difficulty_table.py --table       # the table, of the runs there are
    python scripts/difficulty_table.py key=value …   # settings of every run

Runs are made one after another in OUT/WAY-SEED. One that was broken off goes on from its last
checkpoint when the script is started again, and one that has ended is not made again. A run ends
once validation (greedy, the same tasks every time) has paid 0.9 of what can be had, which is 1 for
each task that is not impossible; or at the last step. The table says, as means over the seeds with
the lowest and the highest: tokens that were sampled until then, those of groups that were left out
among them, the steps, and the share of the tokens in groups whose rewards were all equal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.seeds import seed_for
from examples.mixed_game import task_of
from scripts.table_runs import (
    PROJECT,
    Record,
    arguments,
    folder_of,
    make_all,
    markdown,
    records_of,
    rewards_of,
    run_main,
    shown,
)
from training.observers import Observer, StepReport, StopRequest
from training.outcomes import outcomes_of

STEPS = 120
# Those of `data.seed`.
SEEDS = (1, 2, 3)
# Tasks of a validation.
VALIDATION = 500
# Of the reward that can be had.
GOAL = 0.9
FILTER = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=10",
)
WAYS: dict[str, tuple[str, ...]] = {
    "uniform": ("data.sampler.name=null",),
    "filter_groups": ("data.sampler.name=null", *FILTER),
    "difficulty": ("data.sampler.name=difficulty",),
    "difficulty with filter_groups": ("data.sampler.name=difficulty", *FILTER),
}
HEADINGS = ("tasks", "seeds", "at the goal", "sampled tokens", "steps", "tokens without spread")
# Behind the point, of the columns of numbers.
DIGITS = (0, 0, 2)
TOKENS = "mine/sampled_tokens"
FLAT = "mine/tokens_without_spread"


class TokenCount(Observer):
    """Counts all tokens that are sampled for training, and ends the run at the goal."""

    def __init__(self) -> None:
        self.tokens = 0
        self.flat = 0
        self.reward = 0.0
        self.updates = False

    def update_begins(self, batch: Any) -> None:
        """Sees that what is scored next is what the step trains on."""
        self.updates = True

    def scored(self, batch: Any, scores: Any) -> None:
        """Counts a batch's tokens, those of groups that are to be left out among them."""
        # The step's own groups come once more when they are trained on.
        is_told = self.updates and "token_level_scores" in batch.batch
        if batch.meta_info["validate"] or is_told:
            return
        told = batch.select()
        told.batch["token_level_scores"] = scores
        groups = batch.non_tensor_batch["group_index"]
        told.non_tensor_batch["task_index"] = groups
        for outcome in outcomes_of(told):
            self.tokens += outcome.tokens
            self.flat += 0 if outcome.has_spread else outcome.tokens

    def step_made(self, report: StepReport) -> Mapping[str, float]:
        """Returns the counts of the run so far."""
        self.updates = False
        return {TOKENS: float(self.tokens), FLAT: float(self.flat)}

    def validated(self, step: int, metrics: Mapping[str, float], generations: Any) -> None:
        """Sees the reward of a validation."""
        (self.reward,) = rewards_of([{**metrics, "step": step}]).values()

    def wants_to_stop(self) -> StopRequest | None:
        """Ends the run where the goal is met."""
        goal = float(os.environ["MIXED_GOAL"])
        return StopRequest("the goal is met", 0) if self.reward >= goal else None

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the counts."""
        return {"tokens": self.tokens, "flat": self.flat}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the counts of a checkpoint."""
        self.tokens = state["tokens"]
        self.flat = state["flat"]


def goal_of(seed: int) -> float:
    """Returns the reward at which a run of this seed has met the goal."""
    seeds = [seed_for(seed, 0, -1 - group) for group in range(VALIDATION)]
    possible = [task_of(each).kind != "impossible" for each in seeds]
    return GOAL * sum(possible) / VALIDATION


def is_over(records: Sequence[Record], goal: float, steps: int) -> bool:
    """Checks whether a run has met the goal, or made its last step."""
    if not records:
        return False
    best = max(rewards_of(records).values(), default=0.0)
    return int(records[-1]["step"]) >= steps or best >= goal


def make(folder: Path, way: str, seed: int, steps: int, words: Sequence[str]) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    own = [
        *WAYS[way],
        f"data.seed={seed}",
        f"agent.val_length={VALIDATION}",
        f"trainer.observers=[{PROJECT / 'scripts/difficulty_table.py'}:TokenCount]",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=2",
    ]
    return run_main(folder, "mixed.yaml", [*own, *words], MIXED_GOAL=str(goal_of(seed)))


def numbers_of(records: Sequence[Record], goal: float) -> list[float]:
    """Returns a run's row of the table: whether it met the goal, and what it took."""
    steps = [record for record in records if TOKENS in record]
    last = steps[-1]
    is_met = max(rewards_of(records).values()) >= goal
    tokens = float(last[TOKENS])
    return [float(is_met), tokens, float(last["step"]), last[FLAT] / tokens]


def table(out: Path, seeds: Sequence[int], steps: int) -> str:
    """Writes the table of the runs that have ended, as Markdown."""
    rows = []
    for way in WAYS:
        numbers = []
        for seed in seeds:
            records = records_of(folder_of(out, way, seed))
            goal = goal_of(seed)
            if is_over(records, goal, steps):
                numbers.append(numbers_of(records, goal))
        if numbers:
            met, *others = zip(*numbers, strict=True)
            columns = zip(others, DIGITS, strict=True)
            cells = [shown(values, digits) for values, digits in columns]
            met_cell = f"{sum(map(int, met))} of {len(numbers)}"
            rows.append([way, str(len(numbers)), met_cell, *cells])
    return markdown(HEADINGS, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    args, words = arguments(
        argv, __doc__, list(WAYS), out="outputs/difficulty", seeds=SEEDS, steps=STEPS
    )

    def make_one(folder: Path, way: str, seed: int) -> int:
        return make(folder, way, seed, args.steps, words)

    def has_ended(folder: Path, seed: int) -> bool:
        return is_over(records_of(folder), goal_of(seed), args.steps)

    exit_code = make_all(args, make_one, has_ended)
    if exit_code == 0:
        print(table(args.out, args.seeds, args.steps))
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
