"""Adds to the record of a run from outside: what its own process could not."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from features.run_page.content import make_content
from features.run_page.events import FAILED, FILE, EventLog, read_events
from features.run_page.html import write_html
from features.run_page.report import write_pages
from features.run_page.run_folder import RUNNING, RunFolder
from features.run_page.writer import PAGE
from training.run.metrics_file import last_recorded_step

logger = logging.getLogger(__name__)

# What a process that is started again, or that ends, leaves.
ENDS = ("restart", "end")


def add_event(run_dir: Path, kind: str, **parts: Any) -> None:
    """Adds an event of the step that a run logged last, where the run has a folder."""
    if run_dir.is_dir():
        EventLog(run_dir).add(kind, step=last_recorded_step(run_dir), **parts)


def add_end(run_dir: Path, since: float, **parts: Any) -> None:
    """Adds how a run failed, and has the page say so, unless its last process has said it.

    Args:
        since: seconds since 1970; what happened before is of earlier processes.
    """
    starts = [
        event
        for event in read_events(run_dir / FILE)
        if event["kind"] in (*ENDS, "start", "resume") and event["time"] >= since
    ]
    if not starts or starts[-1]["kind"] in ENDS:
        return
    add_event(run_dir, "end", exit=FAILED, **parts)
    try:
        write_pages([run_dir])
    except (OSError, ValueError) as error:
        logger.warning("the page of %s is not written: %s", run_dir, error)


def write_page_of(run_dirs: Sequence[Path], page: Path, viewer: Path) -> None:
    """Writes the page of runs to a file, with links into this viewer.

    Raises:
        OSError, ValueError: it cannot be written.
    """
    runs = [RunFolder.read(run_dir) for run_dir in run_dirs]
    for run in runs:
        run.viewer = viewer.absolute()
    write_html(make_content(runs, page), page)


def refresh_page(run_dir: Path) -> None:
    """Writes the page of a run that has ended anew, where it has one; a run writes its own.

    Raises:
        OSError, ValueError: it cannot be written.
    """
    page = run_dir / PAGE
    if not page.is_file():
        return
    run = RunFolder.read(run_dir)
    if run.status().word != RUNNING:
        write_html(make_content([run], page), page)
