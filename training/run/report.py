"""A run on one page: `python -m training.run.report RUN_DIR` draws RUN_DIR/report.png and prints a table.

Invariant: it reads RUN_DIR/metrics.jsonl (trainer.logger has "file") and needs nothing else of the run, so that it
works while the run goes on and after a crash.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from training.run.tracking import read_records

REWARD_KEY = "critic/score/mean"
LENGTH_KEY = "response_length/mean"
STEP_TIME_KEY = "timing_s/step"
TABLE_ROWS: dict[str, list[Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COLORS = ("#3b6fb6", "#e0873a", "#4f9d69", "#b8524f", "#8468ac", "#8c6d57", "#d583b4", "#5aa9a3", "#c9b037", "#999999")


# Metric -> its value at each step, NaN where there is no finite one; "step" -> the steps, in order.
Metrics = dict[str, np.ndarray]


def read_metrics(path: Path) -> Metrics:
    """Reads a run's metrics; of a step that was logged twice (before and after a resume) the later value counts."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a run writes it when trainer.logger has 'file'")
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_records(path):
        by_step.setdefault(record["step"], {}).update(record)
    rows = [by_step[step] for step in sorted(by_step)]
    names = dict.fromkeys(name for row in rows for name in row)
    metrics = {name: np.array([float(row.get(name, "nan")) for row in rows]) for name in names}
    return {name: np.where(np.isfinite(values), values, np.nan) for name, values in metrics.items()}


def known(metrics: Metrics, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps that have a finite value of a metric, and those values."""
    there = ~np.isnan(metrics[key])
    return metrics["step"][there], metrics[key][there]


def smooth(values: np.ndarray, window: int) -> list[float]:
    """Averages the `window` values around each, fewer at the ends."""
    half = window // 2
    return [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]


def write_report(run_dir: str | Path, *, reward_key: str = REWARD_KEY, window: int = 5) -> str:
    """Draws report.png into `run_dir` and returns the table; `window` is the number of steps that means run over.

    ValueError where there is no metrics.jsonl or it has no `reward_key`.
    """
    metrics = read_metrics(Path(run_dir) / "metrics.jsonl")
    if reward_key not in metrics:
        others = ", ".join(sorted(metrics.keys() - {"step"})) or "nothing"
        raise ValueError(f"metrics.jsonl has no {reward_key!r}; it has: {others}")
    _draw(metrics, Path(run_dir), reward_key, window)
    return _table(metrics, reward_key, window)


def phase_times(metrics: Metrics) -> tuple[list[str], np.ndarray]:
    """Returns the phases (timing_s/*), the longest first, and the seconds (phases, steps) of steps with a duration.

    A step that lacks the phase has zero; what no phase accounts for is "other".
    """
    if STEP_TIME_KEY not in metrics:
        return [], np.zeros((0, 0))
    timed = ~np.isnan(metrics[STEP_TIME_KEY])
    keys = [key for key in metrics if key.startswith("timing_s/") and key != STEP_TIME_KEY]
    phases = {key.removeprefix("timing_s/"): np.nan_to_num(metrics[key][timed]) for key in keys}
    rest = metrics[STEP_TIME_KEY][timed] - sum(phases.values())
    longest_first = sorted(phases, key=lambda name: -phases[name].sum())
    return [*longest_first, "other"], np.array([*(phases[name] for name in longest_first), np.maximum(rest, 0)])


def _table(metrics: Metrics, reward_key: str, window: int) -> str:
    rows = [("", f"first {window} steps", f"last {window} steps", "best (step)")]
    for label, (key, best) in {"reward": [reward_key, "max"], **TABLE_ROWS}.items():
        if key in metrics:
            rows.append((label, *_summary(*known(metrics, key), best, window)))
    names, seconds = phase_times(metrics)
    for name, first, last in zip(names, _shares(seconds[:, :window]), _shares(seconds[:, -window:]), strict=True):
        rows.append((f"  share of {name}", f"{first:.1%}", f"{last:.1%}", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for label, *cells in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *map(str.rstrip, lines[1:])])


def _summary(steps: np.ndarray, values: np.ndarray, best: str | None, window: int) -> tuple[str, str, str]:
    if not len(values):
        return "nan", "nan", ""
    at = values.argmax() if best == "max" else values.argmin()
    place = f"{values[at]:.4g} ({steps[at]:.0f})" if best else ""
    return f"{values[:window].mean():.4g}", f"{values[-window:].mean():.4g}", place


def _shares(seconds: np.ndarray) -> np.ndarray:
    """Returns each phase's share of the seconds (phases, steps) of all."""
    return seconds.sum(axis=1) / (seconds.sum() or 1.0)


def _draw(metrics: Metrics, run_dir: Path, reward_key: str, window: int) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained", dpi=130)
    reward_axes, length_axes, time_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    figure.suptitle("/".join(run_dir.resolve().parts[-2:]), x=0.01, ha="left", fontsize=13, fontweight="bold")
    _draw_curve(reward_axes, metrics, reward_key, COLORS[0], window)
    validation = [key for key in metrics if key.startswith("val-core/")][:3]
    for key, color in zip(validation, COLORS[1:], strict=False):
        reward_axes.plot(*known(metrics, key), "o-", color=color, markersize=4, linewidth=1, label=key)
    reward_axes.legend(loc="best", frameon=False, fontsize=8)
    if LENGTH_KEY in metrics:
        _draw_curve(length_axes, metrics, LENGTH_KEY, COLORS[2], window)
    _draw_shares(time_axes, metrics)
    time_axes.set_xlabel("step")
    titles = {reward_axes: f"Reward ({reward_key})", length_axes: f"Response length, tokens ({LENGTH_KEY})"}
    for axes, title in {**titles, time_axes: "Where the time goes, share of a step"}.items():
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(run_dir / "report.png")


def _draw_curve(axes: Any, metrics: Metrics, key: str, color: str, window: int) -> None:
    """Draws a metric, with gaps where it is not finite, and its running mean."""
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.plot(metrics["step"], metrics[key], color=color, alpha=0.3, linewidth=1)
    steps, values = known(metrics, key)
    axes.plot(steps, smooth(values, window), color=color, linewidth=2, label=f"mean of {window} steps")


def _draw_shares(axes: Any, metrics: Metrics) -> None:
    names, seconds = phase_times(metrics)
    if not names:
        return
    shares = 100 * seconds / np.maximum(seconds.sum(axis=0), 1e-9)
    colors = [COLORS[i % (len(COLORS) - 1)] for i in range(len(names) - 1)] + [COLORS[-1]]
    axes.stackplot(known(metrics, STEP_TIME_KEY)[0], shares, labels=names, colors=colors, alpha=0.85, step="mid")
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=6, frameon=False, fontsize=8)


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
