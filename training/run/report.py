"""A run on one page: `python -m training.run.report RUN_DIR` draws RUN_DIR/report.png and prints a table.

Invariant: it reads RUN_DIR/metrics.jsonl (trainer.logger has "file") and needs nothing else of the run, so that it
works while the run goes on and after a crash.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from data.texts import table
from training.run.tracking import read_records

REWARD_KEY = "critic/score/mean"
LENGTH_KEY = "response_length/mean"
STEP_TIME_KEY = "timing_s/step"
TABLE_ROWS: dict[str, list[Any]] = table(__file__)


def read_metrics(path: Path) -> pd.DataFrame:
    """Reads a run's metrics: a row a step, a column a metric, NaN where there is no finite value.

    Of a step that was logged twice (before and after a resume) the later value counts.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a run writes it when trainer.logger has 'file'")
    if not (records := [*read_records(path)]):
        raise ValueError(f"{path} has no steps yet")
    logged = pd.DataFrame(records).groupby("step").last()
    return logged.astype(float).replace([np.inf, -np.inf], np.nan)


def smooth(values: pd.Series, window: int) -> pd.Series:
    """Averages the `window` values around each, fewer at the ends, of those that are there."""
    return values.dropna().rolling(window, center=True, min_periods=1).mean()


def phase_times(metrics: pd.DataFrame) -> pd.DataFrame:
    """Returns the seconds of the phases (timing_s/*), the longest first, in each step that has a duration.

    A step that lacks the phase has zero; what no phase accounts for is "other".
    """
    if STEP_TIME_KEY not in metrics:
        return pd.DataFrame()
    phases = metrics.filter(like="timing_s/").dropna(subset=STEP_TIME_KEY).fillna(0.0)
    whole = phases.pop(STEP_TIME_KEY)
    phases.columns = phases.columns.str.removeprefix("timing_s/")
    phases = phases[phases.sum().sort_values(ascending=False).index]
    return phases.assign(other=(whole - phases.sum(axis=1)).clip(lower=0))


def write_report(run_dir: str | Path, *, reward_key: str = REWARD_KEY, window: int = 5) -> str:
    """Draws report.png into `run_dir` and returns the table; `window` is the number of steps that means run over.

    ValueError where there is no metrics.jsonl or it has no `reward_key`.
    """
    metrics = read_metrics(Path(run_dir) / "metrics.jsonl")
    if reward_key not in metrics:
        raise ValueError(f"metrics.jsonl has no {reward_key!r}; it has: {', '.join(sorted(metrics)) or 'nothing'}")
    _draw(metrics, Path(run_dir), reward_key, window)
    return _table(metrics, reward_key, window)


def _table(metrics: pd.DataFrame, reward_key: str, window: int) -> str:
    rows: dict[str, list[str]] = {}
    for label, (key, best) in {"reward": [reward_key, "max"], **TABLE_ROWS}.items():
        if key in metrics:
            values = metrics[key].dropna()
            at = values.agg(f"idx{best}") if best and len(values) else None
            place = "" if at is None else f"{values[at]:.4g} ({at})"
            rows[label] = [f"{values[:window].mean():.4g}", f"{values[-window:].mean():.4g}", place]
    phases = phase_times(metrics)
    first, last = (part.sum() / max(part.sum().sum(), 1e-9) for part in (phases[:window], phases[-window:]))
    rows |= {f"  share of {name}": [f"{first[name]:.1%}", f"{last[name]:.1%}", ""] for name in phases}
    columns = [f"first {window} steps", f"last {window} steps", "best (step)"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).to_string()


def _draw(metrics: pd.DataFrame, run_dir: Path, reward_key: str, window: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained", dpi=130)
    reward_axes, length_axes, time_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    figure.suptitle("/".join(run_dir.resolve().parts[-2:]), x=0.01, ha="left", fontsize=13, fontweight="bold")
    for axes, key in ((reward_axes, reward_key), (length_axes, LENGTH_KEY)):
        axes.set_title(key, loc="left")
        axes.grid(axis="y", alpha=0.3)
        if key in metrics:
            axes.plot(metrics.index, metrics[key], alpha=0.3, linewidth=1)
            axes.plot(smooth(metrics[key], window), color="C0", linewidth=2, label=f"mean of {window} steps")
    for key in [name for name in metrics if name.startswith("val-core/")][:3]:
        reward_axes.plot(metrics[key].dropna(), "o-", markersize=4, linewidth=1, label=key)
    reward_axes.legend(frameon=False, fontsize=8)
    time_axes.set_title("share of a step", loc="left")
    if not (phases := phase_times(metrics)).empty:
        shares = phases.div(phases.sum(axis=1).clip(lower=1e-9), axis=0)
        time_axes.stackplot(shares.index, shares.T, labels=shares.columns, alpha=0.85, step="mid")
        time_axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=6, frameon=False, fontsize=8)
    time_axes.set_xlabel("step")
    figure.savefig(run_dir / "report.png")


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Draws RUN_DIR/report.png and prints a table of the run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder that holds metrics.jsonl")
    parser.add_argument("--reward-key", default=REWARD_KEY)
    parser.add_argument("--window", type=int, default=5, help="steps that means run over")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir, reward_key=args.reward_key, window=args.window))
    except ValueError as error:
        raise SystemExit(f"report: {error}") from error
    print(f"\n{args.run_dir / 'report.png'}")


if __name__ == "__main__":
    main()
