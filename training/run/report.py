"""A run on one page: `python -m training.run.report RUN_DIR` draws RUN_DIR/report.png and prints a table.

Invariant: it reads RUN_DIR/metrics.jsonl (trainer.logger has "file") and needs nothing else of the run, so that it
works while the run goes on and after a crash.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

REWARD_KEY = "critic/score/mean"
LENGTH_KEY = "response_length/mean"
STEP_TIME_KEY = "timing_s/step"
# (label, metric, whether the best value is the largest, the smallest or none)
TABLE_ROWS = (
    ("entropy, nats", "actor/entropy", None),
    ("KL to the old policy, nats", "actor/ppo_kl", None),
    ("KL to the reference, nats", "actor/kl_loss", None),
    ("response length, tokens", LENGTH_KEY, None),
    ("throughput, tokens/s", "perf/throughput", max),
    ("time per step, s", STEP_TIME_KEY, min),
)
COLORS = ("#3b6fb6", "#e0873a", "#4f9d69", "#b8524f", "#8468ac", "#8c6d57", "#d583b4", "#5aa9a3", "#c9b037", "#999999")


class Series(NamedTuple):
    """Holds one metric over the steps that have it."""

    steps: list[int]
    values: list[float]


Metrics = dict[str, Series]


def read_metrics(path: Path) -> Metrics:
    """Reads every metric's series in the order of steps; values that are not finite become NaN, a gap in the picture.

    Of a step that was logged twice (before and after a resume) the later value counts; a line that is only partly
    written is skipped.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a run writes it when trainer.logger has 'file'")
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        by_step.setdefault(record.pop("step"), {}).update(record)
    metrics: Metrics = {}
    for step in sorted(by_step):
        for key, value in by_step[step].items():
            series = metrics.setdefault(key, Series([], []))
            number = float(value)
            series.steps.append(step)
            series.values.append(number if math.isfinite(number) else math.nan)
    return metrics


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Averages the `window` values around each, fewer at the ends; NaN is left out."""
    half = window // 2
    return [_mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def write_report(
    run_dir: str | Path, *, reward_key: str = REWARD_KEY, length_key: str = LENGTH_KEY, window: int = 5
) -> str:
    """Draws report.png into `run_dir` and returns the table; `window` is the number of steps that means run over.

    ValueError where there is no metrics.jsonl or it has no `reward_key`.
    """
    metrics = read_metrics(Path(run_dir) / "metrics.jsonl")
    if reward_key not in metrics:
        raise ValueError(f"metrics.jsonl has no {reward_key!r}; it has: {', '.join(sorted(metrics)) or 'nothing'}")
    _draw(metrics, Path(run_dir), reward_key, length_key, window)
    return _table(metrics, reward_key, window)


def phase_times(metrics: Metrics) -> Metrics:
    """Collects the seconds of each phase of a step (timing_s/*) over the steps, the longest phase first.

    A step that lacks the phase has zero; what no phase accounts for is "other".
    """
    if STEP_TIME_KEY not in metrics:
        return {}
    steps, totals = metrics[STEP_TIME_KEY]
    phases = {}
    for key, series in metrics.items():
        if key.startswith("timing_s/") and key != STEP_TIME_KEY:
            at = dict(zip(*series, strict=True))
            phases[key.removeprefix("timing_s/")] = Series(steps, [at.get(step, 0.0) for step in steps])
    sums = [sum(values) for values in zip(*(series.values for series in phases.values()), strict=True)]
    rest = [max(0.0, total - used) for total, used in zip(totals, sums or [0.0] * len(steps), strict=True)]
    longest_first = dict(sorted(phases.items(), key=lambda item: -sum(item[1].values)))
    return {**longest_first, "other": Series(steps, rest)}


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return fmean(finite) if finite else math.nan


def _table(metrics: Metrics, reward_key: str, window: int) -> str:
    header = ("", f"first {window} steps", f"last {window} steps", "best (step)")
    rows: list[tuple[str, ...]] = [header]
    for label, key, best in (("reward", reward_key, max), *TABLE_ROWS):
        if key in metrics:
            rows.append((label, *_summary(metrics[key], best, window)))
    phases = phase_times(metrics)
    for name, series in phases.items():
        shares = [_share(phases, series, part) for part in (slice(None, window), slice(-window, None))]
        rows.append((f"  share of {name}", *(f"{share:.1%}" for share in shares), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *(line.rstrip() for line in lines[1:])])


def _summary(series: Series, best: Any, window: int) -> tuple[str, str, str]:
    first, last = _mean(series.values[:window]), _mean(series.values[-window:])
    finite = [(value, step) for step, value in zip(*series, strict=True) if not math.isnan(value)]
    if best is None or not finite:
        return f"{first:.4g}", f"{last:.4g}", ""
    value, step = best(finite, key=lambda pair: pair[0])
    return f"{first:.4g}", f"{last:.4g}", f"{value:.4g} ({step})"


def _share(phases: Metrics, series: Series, rows: slice) -> float:
    total = sum(sum(phase.values[rows]) for phase in phases.values())
    return sum(series.values[rows]) / total if total else 0.0


def _draw(metrics: Metrics, run_dir: Path, reward_key: str, length_key: str, window: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained", dpi=130)
    FigureCanvasAgg(figure)
    reward_axes, length_axes, time_axes = figure.subplots(3, 1, sharex=True, height_ratios=(3, 2, 2))
    figure.suptitle("/".join(run_dir.resolve().parts[-2:]), x=0.01, ha="left", fontsize=13, fontweight="bold")
    _draw_curve(reward_axes, metrics[reward_key], COLORS[0], f"mean of {window} steps", window)
    validation = [key for key in metrics if key.startswith("val-core/")][:3]
    for key, color in zip(validation, COLORS[1:], strict=False):
        reward_axes.plot(*metrics[key], "o-", color=color, markersize=4, linewidth=1, label=key)
    reward_axes.legend(loc="best", frameon=False, fontsize=8)
    reward_axes.set_title(f"Reward ({reward_key})", loc="left", fontsize=10)
    if length_key in metrics:
        _draw_curve(length_axes, metrics[length_key], COLORS[2], "", window)
    length_axes.set_title(f"Response length, tokens ({length_key})", loc="left", fontsize=10)
    _draw_shares(time_axes, phase_times(metrics))
    time_axes.set_title("Where the time goes, share of a step", loc="left", fontsize=10)
    time_axes.set_xlabel("step")
    for axes in (reward_axes, length_axes, time_axes):
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (reward_axes, length_axes):
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.savefig(run_dir / "report.png")


def _draw_curve(axes: Any, series: Series, color: str, label: str, window: int) -> None:
    axes.plot(*series, color=color, alpha=0.3, linewidth=1)
    axes.plot(series.steps, smooth(series.values, window), color=color, linewidth=2, label=label)


def _draw_shares(axes: Any, phases: Metrics) -> None:
    if not phases:
        return
    names, columns = list(phases), list(zip(*(series.values for series in phases.values()), strict=True))
    shares = [[100 * value / (sum(column) or 1.0) for value in column] for column in columns]
    colors = [COLORS[i % (len(COLORS) - 1)] for i in range(len(names) - 1)] + [COLORS[-1]]
    axes.stackplot(
        next(iter(phases.values())).steps,
        list(zip(*shares, strict=True)),
        labels=names,
        colors=colors,
        alpha=0.85,
        step="mid",
    )
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=6, frameon=False, fontsize=8)


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Draws RUN_DIR/report.png and prints a table of the run")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder that holds metrics.jsonl")
    parser.add_argument("--reward-key", default=REWARD_KEY)
    parser.add_argument("--length-key", default=LENGTH_KEY)
    parser.add_argument("--window", type=int, default=5, help="steps that means run over")
    args = parser.parse_args(argv)
    try:
        print(write_report(args.run_dir, reward_key=args.reward_key, length_key=args.length_key, window=args.window))
    except ValueError as error:
        raise SystemExit(f"report: {error}") from error
    print(f"\n{args.run_dir / 'report.png'}")


if __name__ == "__main__":
    main()
