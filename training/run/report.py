"""Shows a run on one page: `python -m training.run.report RUN_DIR`.

It draws RUN_DIR/report.png and prints a table. Invariant: it reads RUN_DIR/metrics.jsonl
(trainer.logger has "file") and needs nothing else of the run, so that it works while the run goes
on and after a crash.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from training.run.trackers import is_validation_reward, read_records

REWARD_KEY = "critic/score/mean"
# The rows of the table: label -> metric.
TABLE_ROWS = {
    "reward": "critic/score/mean",
    "entropy, nats": "actor/entropy",
    "KL to the old policy, nats": "actor/ppo_kl",
    "KL to the reference, nats": "actor/kl_loss",
    "response length, tokens": "response_length/mean",
    "throughput, tokens/s": "perf/throughput",
    "time per step, s": "timing_s/step",
}
# So many steps are averaged, and at most half of them all in the table.
WINDOW = 5
# So many validation rewards are drawn at most.
MOST_VALIDATION_CURVES = 3


def read_metrics(path: Path) -> pd.DataFrame:
    """Reads a run's metrics: a row a step, a column a metric, NaN where there is no finite value.

    Of a step that was logged twice (before and after a resume) the later value counts.
    """
    records = list(read_records(path)) if path.is_file() else []
    if not records:
        raise ValueError(f"{path} holds no steps; a run writes them when trainer.logger has 'file'")
    metrics = pd.DataFrame(records).groupby("step").last().astype(float)
    return metrics.replace([np.inf, -np.inf], np.nan)


def write_report(run_dir: str | Path) -> str:
    """Draws report.png into `run_dir` and returns the table.

    Raises:
        ValueError: there is no metrics.jsonl, or no reward in it.
    """
    metrics = read_metrics(Path(run_dir) / "metrics.jsonl")
    if REWARD_KEY not in metrics:
        names = ", ".join(sorted(metrics)) or "nothing"
        raise ValueError(f"metrics.jsonl has no {REWARD_KEY!r}; it has: {names}")
    _draw(metrics, Path(run_dir))
    return _make_table(metrics).to_string(float_format="{:.4g}".format)


def _make_table(metrics: pd.DataFrame) -> pd.DataFrame:
    """Averages the first steps and the last; no step is in both, but where there is only one."""
    rewarded = metrics[REWARD_KEY].dropna()
    window = max(1, min(WINDOW, len(rewarded) // 2))
    columns = ["first step", "last step"]
    if window > 1:
        columns = [f"first {window} steps", f"last {window} steps"]
    rows = {}
    for label, key in TABLE_ROWS.items():
        if key in metrics:
            values = metrics[key].dropna()
            rows[label] = (values[:window].mean(), values[-window:].mean())
    table = pd.DataFrame.from_dict(rows, orient="index", columns=columns)
    if len(rewarded) == 1:
        table = table[columns[1:]].set_axis([f"step {rewarded.index[0]}"], axis="columns")
    return table


def _draw(metrics: pd.DataFrame, run_dir: Path) -> None:
    """Draws the reward's curve, smoothed and not, and validation's."""
    from matplotlib.figure import Figure

    rewards = metrics[REWARD_KEY].dropna()
    smoothed = rewards.rolling(WINDOW, center=True, min_periods=1).mean()
    figure = Figure(figsize=(9, 4), layout="constrained", dpi=130)
    axes = figure.subplots()
    axes.set(title="/".join(run_dir.resolve().parts[-2:]), xlabel="step", ylabel=REWARD_KEY)
    axes.grid(axis="y", alpha=0.3)
    axes.plot(rewards, alpha=0.3, linewidth=1)
    axes.plot(smoothed, color="C0", linewidth=2, label=f"mean of {WINDOW} steps")
    validation = [name for name in metrics if is_validation_reward(name)]
    for key in validation[:MOST_VALIDATION_CURVES]:
        axes.plot(metrics[key].dropna(), "o-", markersize=4, linewidth=1, label=key)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(run_dir / "report.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("python -m training.run.report RUN_DIR: give the folder of one run")
    try:
        print(write_report(sys.argv[1]), f"{sys.argv[1]}/report.png", sep="\n\n")
    except ValueError as error:
        raise SystemExit(f"python -m training.run.report RUN_DIR: {error}") from error
