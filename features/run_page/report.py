"""Shows a run on one page, or several: `python -m features.run_page.report RUN …`.

    RUN                one run's folder: RUN/report.html, RUN/report.png, and a table here
    RUN RUN …          one page of all, runs that differ in their seeds as one line with a band:
                       report.html in the folder that the first lies in
    --out FILE         the page is written to FILE
    --watch            it is written again until the runs have ended

Invariant: it reads what lies in the folders (metrics.jsonl is enough) and needs nothing else of the
run, so that it works while a run goes on and after a crash.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from features.run_page.content import make_content
from features.run_page.html import without_broken_characters, write_html
from features.run_page.metric_store import as_float
from features.run_page.run_folder import RUNNING, RunFolder
from features.run_page.writer import PAGE, PageSchedule
from training.run.metrics_file import read_records
from training.run.validation_names import is_validation_reward, short_name

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
# Between two looks whether there is time to write the page again.
LOOK_S = 1.0


class NoRewards(ValueError):
    """Reports that a run's metrics have no rewards, as where conversations are learnt."""


def read_metrics(path: Path) -> pd.DataFrame:
    """Reads a run's metrics: a row a step, a column a metric, NaN where there is no finite value.

    Of a step that was logged twice (before and after a resume) the later value counts.
    """
    records = list(read_records(path)) if path.is_file() else []
    if not records:
        raise ValueError(f"{path} holds no steps; a run writes them when trainer.logger has 'file'")
    numbers = [{name: as_float(value) for name, value in record.items()} for record in records]
    metrics = pd.DataFrame(numbers).groupby("step").last()
    return metrics.set_index(metrics.index.astype(int)).replace([np.inf, -np.inf], np.nan)


def write_report(run_dir: str | Path) -> str:
    """Draws report.png into `run_dir` and returns the table.

    Raises:
        ValueError: there is no metrics.jsonl, or (NoRewards) no reward in it.
        OSError: the picture cannot be written; an old one stays.
    """
    metrics = _read_rewarded(Path(run_dir))
    _draw(metrics, Path(run_dir))
    return _make_table(metrics)


def _read_rewarded(run_dir: Path) -> pd.DataFrame:
    """Reads the metrics of a run that has rewards; raises NoRewards where there are none."""
    metrics = read_metrics(run_dir / "metrics.jsonl")
    if REWARD_KEY not in metrics:
        names = ", ".join(sorted(metrics)) or "nothing"
        raise NoRewards(f"metrics.jsonl has no {REWARD_KEY!r}; it has: {names}")
    return metrics


def write_pages(
    run_dirs: Sequence[Path], page: Path | None = None, *, rewritten_every: float | None = None
) -> tuple[Path, bool]:
    """Writes the page of one run, or of several; returns its path, and whether one goes on.

    Args:
        page: None: report.html in the run's folder; of several runs beside the first one's.

    Raises:
        ValueError: a folder holds nothing of a run.
        OSError: the page cannot be written.
    """
    for number, run_dir in enumerate(run_dirs):
        if run_dir.resolve() in [earlier.resolve() for earlier in run_dirs[:number]]:
            raise ValueError(f"{run_dir} is given twice: name each run once")
    runs = [RunFolder.read(run_dir) for run_dir in run_dirs]
    if page is None:
        folder = run_dirs[0] if len(runs) == 1 else run_dirs[0].absolute().parent
        page = folder / PAGE
    write_html(make_content(runs, page, rewritten_every=rewritten_every), page)
    goes_on = any(run.status().word == RUNNING for run in runs)
    return page, goes_on


def watch_pages(run_dirs: Sequence[Path], page: Path | None) -> None:
    """Writes the page again until the runs have ended, at most 1 % of the time."""
    schedule = PageSchedule()
    goes_on = True
    while goes_on:
        began = time.perf_counter()
        _, goes_on = write_pages(run_dirs, page, rewritten_every=schedule.pause())
        schedule.took(time.perf_counter() - began)
        while goes_on and not schedule.is_due():
            time.sleep(LOOK_S)


def _make_table(metrics: pd.DataFrame) -> str:
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
    return table.to_string(float_format="{:.4g}".format)


def _draw(metrics: pd.DataFrame, run_dir: Path) -> None:
    """Draws the reward's curve, smoothed and not, and validation's."""
    from matplotlib.figure import Figure

    rewards = metrics[REWARD_KEY].dropna()
    smoothed = rewards.rolling(WINDOW, center=True, min_periods=1).mean()
    figure = Figure(figsize=(9, 4), layout="constrained", dpi=130)
    axes = figure.subplots()
    # Names are no formulas, whatever dollar signs they have.
    axes.set_title(without_broken_characters(RunFolder(run_dir).name), parse_math=False)
    axes.set(xlabel="step", ylabel="mean reward of an episode")
    axes.grid(axis="y", alpha=0.3)
    axes.plot(rewards, alpha=0.3, linewidth=1, label="each training step")
    axes.plot(smoothed, color="C0", linewidth=2, label=f"its mean over {WINDOW} steps")
    validation = [name for name in metrics if is_validation_reward(name)]
    for key in validation[:MOST_VALIDATION_CURVES]:
        label = f"validation: {short_name(key)}"
        axes.plot(metrics[key].dropna(), "o-", markersize=4, linewidth=1, label=label)
    for text in axes.legend(frameon=False, fontsize=8).get_texts():
        text.set_parse_math(False)
    # Half a picture on a full disk takes nobody's place.
    temporary = run_dir / f"report.{os.getpid()}.tmp"
    try:
        # A link that stands there would lead the picture elsewhere.
        temporary.unlink(missing_ok=True)
        figure.savefig(temporary, format="png")
        temporary.replace(run_dir / "report.png")
    finally:
        temporary.unlink(missing_ok=True)


def main(argv: Sequence[str]) -> None:
    """Answers the command line.

    Raises:
        SystemExit: what is wrong is printed in one line; the exit code is 2.
    """
    parser = argparse.ArgumentParser(
        prog="python -m features.run_page.report",
        usage="%(prog)s RUN … [--out FILE] [--watch]",
        description="Writes the page of a run, or of several.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where the page is written")
    parser.add_argument("--watch", action="store_true", help="write it again until the runs end")
    options = parser.parse_args(argv)
    try:
        page, _ = write_pages(options.runs, options.out)
        if len(options.runs) == 1:
            _print_table(options.runs[0])
        print(f"page: {page}", flush=True)
        if options.watch:
            watch_pages(options.runs, page)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


def _print_table(run_dir: Path) -> None:
    """Prints a run's table and draws its reward; a run without rewards has a page alone."""
    try:
        metrics = _read_rewarded(run_dir)
    except ValueError as error:
        print(f"no table: {error}", file=sys.stderr)
        return
    print(_make_table(metrics))
    try:
        _draw(metrics, run_dir)
    except OSError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return
    print(f"\nreward curve: {run_dir / 'report.png'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        # Ctrl-C ended --watch: the page is whole.
        sys.exit(130)
