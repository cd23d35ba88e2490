"""Says what every metric means: one sentence and a unit for each name of metrics.jsonl.

    python -m training.run.metric_names RUN_DIR        # a run's metrics, with their last values
    python -m training.run.metric_names actor/ppo_kl   # what this one means
    python -m training.run.metric_names --page         # writes docs/metrics.md

The core's table is metric_names.yaml; a feature has one of its own in its folder:

    "GPU time":                           # a heading of docs/metrics.md, the core's or a new one
      gpu_seconds/per_task:               # capital letters stand for any text
        unit: "seconds"
        meaning: "What a task of the step takes of the GPUs' time."
        chart: "GPU seconds of a task"    # on the run's page, with all metrics that name this chart
        tile: "GPU seconds of a task"     # among the numbers at the head of that page

Invariant: what this project's own code logs is in a table; metrics of losses, reward functions and
trainers of one's own are not. The first name that fits a metric counts, the core's before others.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from training.features import files
from training.run.metrics_file import read_records

TABLE = Path(__file__).with_name("metric_names.yaml")
DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
PAGE = "metrics.md"
# The page's text before its tables, and behind them.
BEGINNING = """\
# What every metric means

A run writes its metrics to `metrics.jsonl`, a line a step, and to TensorBoard. These commands show
what they mean: all of a run's, with their last values, or one.

    python -m training.run.metric_names outputs/quickstart/run
    python -m training.run.metric_names actor/ppo_kl

Capital letters in a name stand for any text. Shares lie between 0 and 1. Alarms read the checks of
an update, and most numbers of engine against trainer and of the weight sync
([features/alarms](../features/alarms/README.md)). What to do about a number that looks wrong:
[troubleshooting.md](troubleshooting.md#learning). Metrics that a loss, a reward function or a
trainer of your own adds are not listed.
"""
ENDING = """
## Statistics of validation
| STATISTIC | over the N samples of a prompt, then averaged over prompts |
|---|---|
| `mean@N`, `std@N` | mean and standard deviation |
| `best@k/mean`, `worst@k/mean` | expected best and worst of k draws; `/std` is the deviation |
| `maj@k/mean` | what the most frequent `pred` of k draws gets, by resampling |
| `pass@k`, `maj@k` | [evaluations](../features/evaluation/README.md) alone have these |
"""


class Metric(NamedTuple):
    """Describes the metrics of one name, or of one pattern.

    Attributes:
        unit: "1" where it has none.
        meaning: one sentence.
        chart: the title of the chart that shows it on the run's page; "": none of its own.
        tile: what it is called among the numbers at that page's head; "": it is not there.
    """

    name: str
    unit: str
    meaning: str
    chart: str = ""
    tile: str = ""


@cache
def read_table() -> Mapping[str, list[Metric]]:
    """Reads the core's table and those of features: heading -> its metrics.

    A heading of several tables has the metrics of all.

    Raises:
        OSError, ValueError: a table cannot be read, or its entries are none.
    """
    table: dict[str, list[Metric]] = {}
    for file in [TABLE, *files("metrics")]:
        for heading, metrics in _read_file(file).items():
            table.setdefault(heading, []).extend(metrics)
    return table


def _read_file(file: Path) -> dict[str, list[Metric]]:
    """Reads one table."""
    try:
        sections = yaml.safe_load(file.read_text(encoding="utf-8"))
        return {
            heading: [_metric_of(name, entry) for name, entry in metrics.items()]
            for heading, metrics in sections.items()
        }
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{file} is no table of metrics: write a heading, below it the metrics' names, below "
            f"each its unit and meaning, and where it has them its chart and tile ({error})"
        ) from error


def _metric_of(name: str, entry: Mapping[str, str]) -> Metric:
    """Makes a metric of what a table says of it."""
    return Metric(name=name, **entry)


def all_metrics() -> Iterator[Metric]:
    """Yields every entry of the tables."""
    for metrics in read_table().values():
        yield from metrics


def find_metric(name: str) -> Metric | None:
    """Returns the entry that describes a metric; None if there is none."""
    return next((metric for metric in all_metrics() if _fits(metric.name, name)), None)


def _fits(entry: str, name: str) -> bool:
    """Checks whether an entry's name is a metric's; its words in capitals stand for any text."""
    parts = [re.escape(part) for part in re.split("[A-Z]{2,}", entry)]
    return re.fullmatch(".+".join(parts), name) is not None


def write_page() -> str:
    """Returns the text of docs/metrics.md."""
    lines = [BEGINNING]
    for title, metrics in read_table().items():
        lines += [f"## {title}", "| metric | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{each.name}` | {each.unit} | {each.meaning} |" for each in metrics]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n" + ENDING


def describe_run(folder: Path) -> Iterator[str]:
    """Yields a line for each metric of a run: its last value, its unit, what it means."""
    last: dict[str, float] = {}
    for record in read_records(folder / "metrics.jsonl"):
        last.update(record)
    last.pop("step", None)
    for name, value in sorted(last.items()):
        metric = find_metric(name)
        if metric is None:
            yield f"{name} = {value}: a metric of this run's own code"
        else:
            yield f"{name} = {float(value):.6g} ({metric.unit}): {metric.meaning}"


def main(words: list[str]) -> int:
    """Answers the command line; returns the exit code."""
    if words == ["--page"]:
        (DOCS / PAGE).write_text(write_page(), encoding="utf-8")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    if (Path(words[0]) / "metrics.jsonl").is_file():
        print("\n".join(describe_run(Path(words[0]))))
        return 0
    metric = find_metric(words[0])
    if metric is None:
        print(
            f"{words[0]} is no folder with a metrics.jsonl, and no metric of this project; "
            "docs/metrics.md lists them",
            file=sys.stderr,
        )
        return 1
    print(f"{words[0]} ({metric.unit}): {metric.meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
