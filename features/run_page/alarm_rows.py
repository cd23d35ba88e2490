"""Makes a page's rows of alarms, and the spans of steps over which each stood.

A run that recorded its events has what was said. For an older one the metrics `alarms/NAME` tell
when each began, and how long it stood.
"""

from pathlib import Path
from typing import Any

import numpy as np

from features.run_page.run_folder import RunFolder
from training.features import features

# The feature that knows what alarms mean.
ALARMS = "alarms"
PREFIX = "alarms/"
COUNT = "alarms/count"
MOST_ROWS = 400
MOST_SPANS = 300


def meanings() -> dict[str, str]:
    """Returns what each alarm means; nothing where the alarms' feature is not there."""
    if ALARMS not in features():
        return {}
    from features.alarms.feature import meanings as of_alarms

    return of_alarms()


def alarms_page() -> Path | None:
    """Returns the page that says what each alarm means, where it is there."""
    if ALARMS not in features():
        return None
    from features.alarms.feature import page

    return page()


def about(alarm: str, step: int) -> tuple[str, str | None]:
    """Returns what to check when an alarm rings in a step, and the viewer's address of it.

    "" and None where the alarms' feature is not there, or knows no such alarm.
    """
    if ALARMS not in features():
        return "", None
    from features.alarms.feature import advice_on, view_of_step

    return advice_on(alarm), view_of_step(alarm, step)


def spans_of(folder: RunFolder) -> dict[str, list[list[int]]]:
    """Returns the spans of steps, [first, last], over which each alarm stood."""
    spans = {}
    for name in folder.metrics.names:
        if name.startswith(PREFIX) and name != COUNT:
            steps, standing = folder.metrics.column(name)
            found = _spans(steps, standing)
            if found:
                spans[name.removeprefix(PREFIX)] = found
    return spans


def _spans(steps: np.ndarray, standing: np.ndarray) -> list[list[int]]:
    """Joins steps at which an alarm stood, for `standing` steps then, to spans."""
    spans: list[list[int]] = []
    for step, count in zip(steps.tolist(), standing.tolist(), strict=True):
        if not np.isfinite(count) or count < 1:
            continue
        first = max(step - int(count) + 1, 0)
        if spans and first <= spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([first, step])
    return spans[-MOST_SPANS:]


def alarm_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Lists a run's alarms in the order in which they began, a row for each time that one stood.

    A row has the time (or null) and the step of its beginning, the step up to which it stood, how
    often it was said, what was said last, and the view of what rang it first; `first` tells that
    it names a setting with which the run went on: a cause stands before what comes of it.
    """
    spans = spans_of(folder)
    changed: set[str] = set()
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for event in folder.events:
        if event["kind"] == "settings" and isinstance(event.get("changed"), dict):
            changed |= {str(key) for key in event["changed"]}
        if event["kind"] != "alarm":
            continue
        name = event["name"]
        first, last = _span_around(spans.get(name, []), event["step"])
        row = rows.setdefault(
            (name, first),
            {
                "time": event["time"],
                "step": event["step"],
                "last": last,
                "said": 0,
                "name": name,
                "view": event["view"],
                "meaning": meanings().get(name, ""),
                "first": any(f"{key}=" in event["text"] for key in changed),
            },
        )
        row["said"] += 1
        row["text"] = event["text"]
    return list(rows.values()) or _rows_of_metrics(folder)


def _span_around(spans: list[list[int]], step: int) -> tuple[int, int]:
    """Returns the span that a step lies in; the step alone where no metric tells of one."""
    for first, last in spans:
        if first <= step <= last:
            return first, last
    return step, step


def _rows_of_metrics(folder: RunFolder) -> list[dict[str, Any]]:
    """Makes a row of each span of a run that recorded no events."""
    rows = []
    for name, spans in spans_of(folder).items():
        for first, last in spans:
            advice, view = about(name, last)
            text = f"alarm {name} stood from step {first} to {last}"
            rows.append(
                {
                    "time": None,
                    "step": first,
                    "last": last,
                    "said": 1,
                    "name": name,
                    "text": f"{text}; check {advice}" if advice else text,
                    "view": view,
                    "meaning": meanings().get(name, ""),
                    "first": False,
                }
            )
    return sorted(rows, key=lambda row: row["step"])
