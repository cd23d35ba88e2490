"""Writes what happened to a run, beside its metrics: RUN_DIR/events.jsonl, a line an event.

    {"time": 1764081916.2, "step": 20, "kind": "alarm", "name": "kl_jump", "text": "…", "view": "…"}

`kind` is one of KINDS. `view` is the viewer's address of what an alarm is about (a query, or null).
`start` and `resume` say how the process was started (`command`, `versions`, `total_steps`),
`settings` what changed (`changed`: key -> [old, new]), `restart` how the attempt before ended
(`code`), `end` how this one did (`exit`: finished, interrupted or failed).

Invariant: the file holds whole lines, in the order of time. A run that goes on from a step keeps
what was until then, and of what came later the starts, restarts and ends: these have happened,
while the steps are made again. A new run sets an old file aside as events.jsonl.old. A full disk
costs the line, not the run.
"""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.texts import text_of
from training.config.plain_files import plain_lines
from training.run.files import append_line, write_atomically

logger = logging.getLogger(__name__)

FILE = "events.jsonl"
# Events of processes; a step that is made again does not undo them.
OF_PROCESSES = ("start", "resume", "restart", "end")
KINDS = (*OF_PROCESSES, "alarm", "settings", "checkpoint", "validation")
# How a process ended.
FINISHED = "finished"
INTERRUPTED = "interrupted"
FAILED = "failed"
# Seconds since 1970 that no clock shows.
LAST_TIME = 1e11
# No run gets further; pages hold steps in 32 bits.
LAST_STEP = 2**31 - 1

Event = dict[str, Any]


class EventLog:
    """Appends events to a run's file.

    Args:
        run_dir: the run's folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FILE
        self._warned = False

    def begin(self, step: int, *, is_restart: bool = False) -> list[Event]:
        """Makes the file ready for a process that goes on from `step`; returns what it holds.

        Args:
            step: 0: a new run, before which an old file becomes events.jsonl.old.
            is_restart: this process is another attempt at the run before, even at step 0.
        """
        try:
            return self._begin(step, is_restart)
        except OSError as error:
            self._warn(error)
            return []

    def _begin(self, step: int, is_restart: bool) -> list[Event]:
        if not self.path.exists():
            return []
        if step == 0 and not is_restart:
            if self.path.stat().st_size > 0:
                self.path.replace(self.path.with_name(FILE + ".old"))
            return []
        events = list(read_events(self.path))
        if step == 0:
            events = _of_the_last_run(events)
        kept = [event for event in events if stays(event, step)]
        lines = [json.dumps(event) + "\n" for event in kept]
        write_atomically(self.path, "".join(lines))
        return kept

    def add(
        self,
        kind: str,
        *,
        step: int,
        name: str = "",
        text: str = "",
        view: str | None = None,
        **more: Any,
    ) -> Event:
        """Appends an event that happens now, and returns it; a line without room is left out."""
        event = {
            "time": round(time.time(), 3),
            "step": step,
            "kind": kind,
            "name": name,
            "text": text,
            "view": view,
            **more,
        }
        try:
            append_line(self.path, json.dumps(event, default=str))
        except OSError as error:
            self._warn(error)
        return event

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            logger.warning("events are not recorded, the run goes on without: %s", error)
        self._warned = True


def stays(event: Event, step: int) -> bool:
    """Checks whether an event is still true of a run that goes on from `step`."""
    return event["step"] <= step or event["kind"] in OF_PROCESSES


def _of_the_last_run(events: Sequence[Event]) -> list[Event]:
    """Leaves out what lies before the last end that nobody restarts from."""
    first = 0
    for number, event in enumerate(events):
        if event["kind"] == "end" and event.get("exit") in (FINISHED, INTERRUPTED):
            first = number + 1
    return list(events[first:])


def read_events(path: Path) -> Iterator[Event]:
    """Yields a file's events; a line that holds none, or part of one, is left out and said.

    A file that is not there holds none.
    """
    if not path.is_file():
        return
    for number, content in enumerate(plain_lines(path), start=1):
        line = content.decode("utf-8", errors="replace")
        if not line.strip():
            continue
        try:
            yield _read_event(line)
        except (ValueError, RecursionError) as error:
            logger.warning("%s, line %d, is damaged and left out: %s", path, number, error)


def _read_event(line: str) -> Event:
    """Reads a line.

    Raises:
        ValueError: it is not JSON, or lacks what every event has.
    """
    event = json.loads(line)
    if not isinstance(event, dict):
        raise ValueError("it is no object")
    step = event.get("step")
    whole_step = type(step) is int and 0 <= step <= LAST_STEP
    seconds = event.get("time")
    timed = isinstance(seconds, int | float) and 0 <= seconds < LAST_TIME
    if not whole_step or not timed or event.get("kind") not in KINDS:
        raise ValueError('it lacks a "time", a "step" or a known "kind"')
    view = event.get("view")
    return event | {
        "name": str(event.get("name") or ""),
        "text": str(event.get("text") or ""),
        "view": view if isinstance(view, str) else None,
    }


def describe_error(error: BaseException, most_chars: int = 600) -> str:
    """Says an error in one line; one that a rank raised has its traceback for a text."""
    text = text_of(error).strip()
    lines = text.splitlines()
    if lines and "Traceback (most recent call last)" in text:
        text = lines[-1]
    line = " ".join(f"{type(error).__name__}: {text}".split())
    return line if len(line) <= most_chars else line[: most_chars - 1] + "…"
