"""A run on one page: `python -m training.run.report RUN_DIR` draws RUN_DIR/report.png and prints a table.

Invariant: it reads RUN_DIR/metrics.jsonl (trainer.logger has "file") and needs nothing else of the run, so that it
works while the run goes on and after a crash.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from data.texts import table
from training.run.tracking import read_records

REWARD_KEY = "critic/score/mean"
# By label, the metrics that the table has.
TABLE_ROWS: dict[str, str] = table(__file__)
# So many steps are averaged.
WINDOW = 5


def read_metrics(path: Path) -> pd.DataFrame:
    """Reads a run's metrics: a row a step, a column a metric, NaN where there is no finite value.

    Of a step that was logged twice (before and after a resume) the later value counts.
    """
    if not (records := [*read_records(path)] if path.is_file() else []):
        raise ValueError(f"{path} holds no steps; a run writes them when trainer.logger has 'file'")
    return (
        pd.DataFrame(records)
        .groupby("step")
        .last()
        .astype(float)
        .replace([np.inf, -np.inf], np.nan)
    )


def write_report(run_dir: str | Path) -> str:
    """Draws report.png into `run_dir` and returns the table.

    ValueError where there is no metrics.jsonl, or no reward in it.
    """
    metrics = read_metrics(Path(run_dir) / "metrics.jsonl")
    if REWARD_KEY not in metrics:
        raise ValueError(
            f"metrics.jsonl has no {REWARD_KEY!r}; it has: {', '.join(sorted(metrics)) or 'nothing'}"
        )
    _draw(metrics, Path(run_dir))
    there = {label: metrics[key].dropna() for label, key in TABLE_ROWS.items() if key in metrics}
    rows = {
        label: (values[:WINDOW].mean(), values[-WINDOW:].mean()) for label, values in there.items()
    }
    columns = [f"first {WINDOW} steps", f"last {WINDOW} steps"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).to_string(
        float_format="{:.4g}".format
    )


def _draw(metrics: pd.DataFrame, run_dir: Path) -> None:
    from matplotlib.figure import Figure

    figure, rewards = (
        Figure(figsize=(9, 4), layout="constrained", dpi=130),
        metrics[REWARD_KEY].dropna(),
    )
    axes = figure.subplots()
    axes.set(title="/".join(run_dir.resolve().parts[-2:]), xlabel="step", ylabel=REWARD_KEY)
    axes.grid(axis="y", alpha=0.3)
    axes.plot(rewards, alpha=0.3, linewidth=1)
    means = rewards.rolling(WINDOW, center=True, min_periods=1).mean()
    axes.plot(means, color="C0", linewidth=2, label=f"mean of {WINDOW} steps")
    for key in [name for name in metrics if name.startswith("val-core/")][:3]:
        axes.plot(metrics[key].dropna(), "o-", markersize=4, linewidth=1, label=key)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(run_dir / "report.png")


if __name__ == "__main__":
    try:
        print(write_report(sys.argv[1]), f"{sys.argv[1]}/report.png", sep="\n\n")
    except (IndexError, ValueError) as error:
        raise SystemExit(f"python -m training.run.report RUN_DIR: {error}") from error
