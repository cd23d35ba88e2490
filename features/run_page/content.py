"""Puts together what a page holds, as one JSON value that its script reads.

Invariant: texts of a run (alarms, settings, commands, names) are data here and stay so on the page;
the script writes them as text, never as markup. Characters that change how other text is shown
(control characters, bidirectional overrides) are written out as escapes.
"""

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from features.run_page.alarm_rows import MOST_ROWS, alarm_rows, alarms_page, spans_of
from features.run_page.charts import (
    TIMING,
    charts_of,
    section_name,
    sections_beside,
    sections_of,
)
from features.run_page.curves import CurveWriter, points_for
from features.run_page.events import OF_PROCESSES
from features.run_page.groups import Group, group_runs, names_of, table_of_groups
from features.run_page.looks import looks_of
from features.run_page.own_tables import read_tables
from features.run_page.run_folder import RUNNING, RunFolder
from features.run_page.settings import Change, as_text, differences_from_defaults
from features.run_page.tiles import tiles_of
from training.run.files import from_here
from training.run.metric_names import Metric, find_metric

# The folder that `python -m features.viewer.command` is given in.
CLONE = Path(__file__).resolve().parents[2]
# The steps in the table of step times.
LAST_STEPS = 8
# Steps that a summary's first and last value are means of.
WINDOW = 5
SUMMARY = {
    "critic/score/mean": "reward of an episode",
    "response_length/mean": "response, tokens",
    "actor/entropy": "entropy, nats per token",
    "perf/throughput": "tokens per second",
    "timing_s/step": "seconds per step",
}
# The most checkpoints and validations; events of processes and settings are told throughout.
MOST_EVENTS = 1000
TOLD_THROUGHOUT = (*OF_PROCESSES, "settings")
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def make_content(
    runs: Sequence[RunFolder], page: Path, *, rewritten_every: float | None = None
) -> dict[str, Any]:
    """Returns what a page of these runs holds.

    Args:
        page: the file that it is written to; links are relative to its folder.
        rewritten_every: seconds after which it is written again, while a run goes on; None: it is
            not.
    """
    groups = group_runs(runs)
    names = sorted({name for group in groups for name in group.names})
    run_names = names_of(runs)
    title = runs[0].name if len(runs) == 1 else " · ".join(group.name for group in groups)
    alarm_docs = alarms_page()
    content = {
        "title": title,
        "written": time.time(),
        "rewrittenEvery": rewritten_every,
        "charts": [chart.as_json() for chart in charts_of(names, _known_metric)],
        "metrics": [_described(name) for name in names],
        "runs": [_facts_of(run, page) | {"name": run_names[run.path]} for run in runs],
        "differences": table_of_groups(groups),
        "alarmDocs": _link(alarm_docs, page) if alarm_docs is not None else None,
    }
    shown: dict[str, Any] = visible(content)
    # Curves are long, and hold no text but names.
    most = points_for(sum(len(group.names) for group in groups))
    return shown | {"groups": [_curves_of(group, runs, most) for group in groups]}


def visible(value: Any) -> Any:
    """Writes invisible characters of all texts within a JSON value as escapes."""
    if isinstance(value, str):
        if INVISIBLE.search(value) is None:
            return value
        return INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    if isinstance(value, Mapping):
        return {visible(key): visible(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [visible(entry) for entry in value]
    return value


def _curves_of(group: Group, runs: Sequence[RunFolder], most: int) -> dict[str, Any]:
    """Writes every curve of a group, of so many points at most, with the numbers of its runs."""
    numbers = {run.path: number for number, run in enumerate(runs)}
    writer = CurveWriter()
    curves = {visible(name): writer.write(group.curve(name, most)) for name in group.names}
    return {
        "name": visible(group.name),
        "runs": [numbers[run.path] for run in group.runs],
        "tables": writer.tables,
        "curves": curves,
    }


@cache
def _known_metric(name: str) -> Metric | None:
    return find_metric(name)


def _described(name: str) -> dict[str, str]:
    """Returns a metric with its sentence."""
    metric = _known_metric(name)
    if metric is None:
        return {"name": name, "unit": "", "meaning": "A metric of this run's own code."}
    return {"name": name, "unit": metric.unit, "meaning": metric.meaning}


def _facts_of(run: RunFolder, page: Path) -> dict[str, Any]:
    """Returns what a page says of one run beside its curves."""
    status = run.status()
    rows = alarm_rows(run)
    starts = run.starts
    last = starts[-1] if starts else {}
    times = [event["time"] for event in run.events]
    began = starts[0]["time"] if starts else None
    total = last.get("total_steps")
    return {
        "path": str(run.path),
        "status": status.word,
        "statusLine": status.line,
        "isRunning": status.word == RUNNING,
        "lastStep": run.last_step,
        "totalSteps": total if type(total) is int else None,
        "began": began,
        "seconds": max(times) - began if began is not None else None,
        "command": str(last.get("command") or ""),
        "versions": _texts(last.get("versions")),
        "tiles": tiles_of(
            run.metrics,
            total if type(total) is int else None,
            goes_on=status.word == RUNNING,
        ),
        "summary": _summary(run),
        "alarms": rows[-MOST_ROWS:],
        "alarmsLeftOut": max(0, len(rows) - MOST_ROWS),
        "spans": spans_of(run),
        "events": _events_of(run),
        "changes": _changes_of(run),
        "settings": [row._asdict() for row in differences_from_defaults(run.settings)],
        "stepTimes": _step_times(run),
        "tables": read_tables(run.path),
        "looks": looks_of(run.metrics, run.metrics.last_step),
        "viewer": _viewer_of(run, page),
    }


def _texts(value: object) -> dict[str, str]:
    """Returns a mapping of texts, whatever a damaged event holds in its place."""
    if not isinstance(value, dict):
        return {}
    return {str(key): str(entry) for key, entry in value.items()}


def _summary(run: RunFolder) -> list[dict[str, Any]]:
    """Averages the first steps and the last of some metrics."""
    labels = dict(SUMMARY)
    for name in run.metrics.names:
        metric = _known_metric(name)
        if metric is not None and metric.tile:
            labels[name] = metric.tile
    rows: list[dict[str, Any]] = []
    constants: list[dict[str, Any]] = []
    for name, label in labels.items():
        _, values = run.metrics.column(name)
        values = values[values == values]
        if not len(values):
            continue
        window = max(1, min(WINDOW, len(values) // 2))
        is_constant = len(values) > 1 and bool((values == values[0]).all())
        (constants if is_constant else rows).append(
            {
                "label": label,
                "metric": name,
                "first": _finite(values[:window].mean()) if len(values) > 1 else None,
                "last": _finite(values[-window:].mean()),
                "steps": window,
            }
        )
    # What never changed is told last.
    return rows + constants


def _finite(value: float) -> float | None:
    number = float(value)
    return number if abs(number) < float("inf") else None


def _events_of(run: RunFolder) -> list[dict[str, Any]]:
    """Lists what happened beside alarms, for marks and the time line."""
    events = [event for event in run.events if event["kind"] != "alarm"]
    others = [event for event in events if event["kind"] not in TOLD_THROUGHOUT]
    left_out = {id(event) for event in others[:-MOST_EVENTS]}
    found = []
    for event in events:
        if id(event) not in left_out:
            parts = {key: event[key] for key in ("time", "step", "kind", "name", "text")}
            found.append(parts)
    return found


def _changes_of(run: RunFolder) -> list[dict[str, Any]]:
    """Lists changes of settings: those that events tell of, else those of config.N.yaml."""
    changes = list(run.changes)
    if not changes:
        for event in run.events:
            if event["kind"] == "settings" and isinstance(event.get("changed"), dict):
                changes.append(Change(event["step"], _pairs(event["changed"])))
    return [
        {
            "step": change.step,
            "changed": [
                {"key": key, "before": before, "after": after}
                for key, (before, after) in change.changed.items()
            ],
        }
        for change in changes
    ]


def _pairs(changed: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    pairs = {}
    for key, values in changed.items():
        if isinstance(values, list | tuple) and len(values) == 2:
            pairs[str(key)] = (as_text(values[0]), as_text(values[1]))
    return pairs


def _step_times(run: RunFolder) -> dict[str, Any]:
    """Makes the table of where the last steps' seconds went."""
    names = run.metrics.names
    sections = [*sections_of(names), *sections_beside(names)]
    steps, _ = run.metrics.column(TIMING + "step")
    last = steps[-LAST_STEPS:].tolist()
    columns = {"whole step": run.metrics.values_at(TIMING + "step", last)}
    for section in sections:
        columns[section_name(section)] = run.metrics.values_at(TIMING + section, last)
    return {"steps": last, "columns": columns}


def _viewer_of(run: RunFolder, page: Path) -> dict[str, Any]:
    """Says where the viewer of a run's episodes lies, whether it does, and what makes it."""
    return {
        "href": _link(run.viewer_page, page),
        "isThere": run.has_viewer,
        "hasEpisodes": run.has_episodes,
        "command": _viewer_command(run),
    }


def _viewer_command(run: RunFolder) -> str:
    """Returns what makes the viewer: short where it is given in the clone, else from anywhere."""
    module = ["-m", "features.viewer.command"]
    if Path.cwd() == CLONE:
        return shlex.join([from_here(Path(sys.executable)), *module, from_here(run.path)])
    # Not resolved: the Python of a virtual environment is a link.
    words = [str(Path(sys.executable).absolute()), *module, str(run.path)]
    return f"cd {shlex.quote(str(CLONE))} && {shlex.join(words)}"


def _link(target: Path, page: Path) -> str:
    """Returns a relative link from the page to a file."""
    relative = os.path.relpath(target.absolute(), page.absolute().parent)
    # A name that is no UTF-8 is quoted by its bytes.
    return quote(os.fsencode(relative))
