"""Learns the errands' game with a tiny model in several ways, at the same number of sampled tokens.

    python scripts/errands_curve.py                 # every way, rate and seed; then the tables
    python scripts/errands_curve.py --seeds 0 --ways grpo vine
    python scripts/errands_curve.py --table         # the tables, of the runs there are
    python scripts/errands_curve.py key=value …     # settings of every run

The game is that of configs/errands.yaml, with fewer errands before the door. The model is made
first, in OUT/model: it knows how answers look, and not which are good. Runs are made one after
another in OUT/WAY-RATE-SEED, and end at the first step with which all tokens that they sampled,
those of continuations included, are TOKENS. One that was broken off goes on from its last
checkpoint when the script is started again, and one that has ended is not made again. Each way has
its best of three rates: the one with the highest median, over the seeds, of the success at last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from scripts import table_runs
from scripts.table_runs import PROJECT, Record, markdown, run_main

TURNS = 4
TOKENS = 300_000
SEEDS = (0, 1, 2)
RATES = (1e-4, 3e-4, 1e-3)
# In which the model learns how answers look, so well that luck does not make it forget at once.
WARM_STEPS = 1000
# Points of the curve; each is a mean over as many tokens.
POINTS = 10
CRITIC = ("critic.model.path={model}", "critic.optim.lr=1.0e-3")
CONTINUED = ("branching.at=every", "branching.samples=1")
WAYS: dict[str, tuple[str, ...]] = {
    "grpo": ("algorithm.adv_estimator=grpo",),
    "rloo": ("algorithm.adv_estimator=rloo",),
    "turn_gae": ("algorithm.adv_estimator=turn_gae", *CRITIC),
    "vine": ("algorithm.adv_estimator=vine", *CONTINUED),
    "vine_redraw": ("algorithm.adv_estimator=vine_redraw", *CONTINUED),
    "vine_redraw of the door": (
        "algorithm.adv_estimator=vine_redraw",
        "branching.at=[{last}]",
        "branching.samples=1",
    ),
    "tree_grpo, 4 branches at the door": (
        "algorithm.adv_estimator=tree_grpo",
        "branching.at=[{last}]",
        "branching.samples=3",
        "branching.train=true",
    ),
}
SUCCESS = "agent/info/won/mean"
SAMPLED = "training/sampled_tokens"


def folder_of(out: Path, way: str, rate: float, seed: int) -> Path:
    """Returns the folder of a run."""
    return table_runs.folder_of(out, f"{way}-{rate:g}", seed)


def records_of(folder: Path) -> list[Record]:
    """Reads a run's metrics of its steps; none where it has not begun."""
    return [record for record in table_runs.records_of(folder) if SUCCESS in record]


def sampled_tokens(records: Sequence[Record]) -> int:
    """Counts the tokens that a run has sampled."""
    return int(records[-1][SAMPLED]) if records else 0


def game_words(turns: int) -> list[str]:
    """Returns the settings of the game."""
    environment = (
        f"{{path: {PROJECT}/examples/errands_game.py, cls: Errands, kwargs: {{turns: {turns}}}}}"
    )
    return [f"agent.environment={environment}", f"agent.max_turn={turns}"]


def make_model(folder: Path, turns: int) -> None:
    """Makes the model that all runs begin with, once."""
    from prepare_game import prepare

    from training.config.loader import load_config

    config = str(PROJECT / "configs/errands.yaml")
    words = [config, *game_words(turns), f"actor_rollout_ref.model.path={folder}"]
    prepare(load_config(words, check=False).config, steps=WARM_STEPS)


def make(
    folder: Path, way: str, rate: float, seed: int, args: argparse.Namespace, words: Sequence[str]
) -> int:
    """Makes a run, or goes on with it; returns its exit code."""
    model = args.out / "model"
    own = [word.format(model=model, last=args.turns - 1) for word in WAYS[way]]
    settings = [
        *game_words(args.turns),
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.actor.optim.lr={rate}",
        *own,
        f"data.seed={seed}",
        "trainer.total_training_steps=100000",
        f"trainer.total_sampled_tokens={args.tokens}",
        "trainer.save_freq=50",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.max_critic_ckpt_to_keep=1",
        *words,
    ]
    return run_main(folder, "errands.yaml", settings)


def curve_of(records: Sequence[Record], tokens: int) -> list[float]:
    """Returns a run's success, as means over equal parts of its tokens."""
    parts: list[list[float]] = [[] for _ in range(POINTS)]
    before = 0.0
    for record in records:
        part = min(int(before / tokens * POINTS), POINTS - 1)
        parts[part].append(float(record[SUCCESS]))
        before = float(record[SAMPLED])
    curve: list[float] = []
    for part_values in parts:
        # A step may be longer than a part.
        curve.append(statistics.mean(part_values) if part_values else curve[-1])
    return curve


def curves(
    out: Path, way: str, rate: float, seeds: Sequence[int], tokens: int
) -> list[list[float]]:
    """Returns the curves of the runs that have ended, a seed each."""
    runs = [records_of(folder_of(out, way, rate, seed)) for seed in seeds]
    return [curve_of(run, tokens) for run in runs if sampled_tokens(run) >= tokens]


def best_rate(out: Path, way: str, seeds: Sequence[int], tokens: int) -> float | None:
    """Returns the rate with the highest median success at last; None: no run has ended."""
    medians = {}
    for rate in RATES:
        found = curves(out, way, rate, seeds, tokens)
        if found:
            medians[rate] = statistics.median(curve[-1] for curve in found)
    return max(medians, key=medians.__getitem__) if medians else None


def shown(values: Sequence[float]) -> str:
    """Writes a median with the lowest and the highest of several values."""
    middle = f"{statistics.median(values):.2f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.2f}–{max(values):.2f})"


def table(out: Path, seeds: Sequence[int], tokens: int) -> str:
    """Writes success at last, and the curve, of each way at its best rate, as Markdown."""
    points = [f"{(number + 1) * tokens // POINTS // 1000}k" for number in range(POINTS)]
    headings = ["", "rate", "seeds", "updates", "success at last", *points]
    rows = []
    for way in WAYS:
        rate = best_rate(out, way, seeds, tokens)
        if rate is None:
            continue
        found = curves(out, way, rate, seeds, tokens)
        steps = [
            int(run[-1]["step"])
            for run in (records_of(folder_of(out, way, rate, seed)) for seed in seeds)
            if sampled_tokens(run) >= tokens
        ]
        at_last = shown([curve[-1] for curve in found])
        middle = [f"{statistics.median(values):.2f}" for values in zip(*found, strict=True)]
        cells = [way, f"{rate:g}", str(len(found)), str(int(statistics.median(steps)))]
        rows.append([*cells, at_last, *middle])
    return markdown(headings, rows)


def parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Reads the command line; returns the settings of every run, too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/errands_curve"))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--rates", type=float, nargs="+", choices=RATES, default=list(RATES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="that a run samples")
    parser.add_argument("--turns", type=int, default=TURNS, help="of the game, the door's included")
    parser.add_argument("--table", action="store_true", help="make no run")
    args, words = parser.parse_known_args(argv)
    wrong = [word for word in words if "=" not in word or word.startswith("-")]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    return args, words


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what is missing, and prints the table; returns the exit code."""
    args, words = parsed(argv)
    if not args.table:
        make_model(args.out / "model", args.turns)
    # A seed at a time, so that there is something of every way where the time runs out.
    for seed in args.seeds if not args.table else ():
        for way in args.ways:
            for rate in args.rates:
                folder = folder_of(args.out, way, rate, seed)
                if sampled_tokens(records_of(folder)) >= args.tokens:
                    continue
                exit_code = make(folder, way, rate, seed, args, words)
                print(f"{way}, rate {rate:g}, seed {seed}: exit code {exit_code}", flush=True)
                if exit_code:
                    print(f"see {folder}/log.txt", file=sys.stderr)
                    return exit_code
    print(table(args.out, args.seeds, args.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
