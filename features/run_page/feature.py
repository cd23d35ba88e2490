"""Writes a run's page, and what happened in it: report.html and events.jsonl.

What other features ask of the page stands here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training.features import Feature

FEATURE = Feature(
    moved_modules={
        "training.run.page": "features.run_page",
        "training.run.run_record": "features.run_page.observer",
        "training.run.start_facts": "features.run_page.observer",
        "training.run.events": "features.run_page.events",
        "training.run.report": "features.run_page.report",
    },
    observer="features.run_page.observer:open_page",
    observer_order=40,
)


def add_event(run_dir: Path, kind: str, **parts: Any) -> None:
    """Adds an event of the step that a run logged last, where the run has a folder."""
    from features.run_page.attempts import add_event as add

    add(run_dir, kind, **parts)


def add_end(run_dir: Path, since: float, **parts: Any) -> None:
    """Adds how a process of a run ended that could not say so itself; see `attempts.add_end`."""
    from features.run_page.attempts import add_end as add

    add(run_dir, since, **parts)


def write_page_of(run_dirs: Sequence[Path], page: Path, *, viewer: Path) -> None:
    """Writes the page of runs to a file, with links into a viewer beside it.

    Raises:
        OSError, ValueError: it cannot be written.
    """
    from features.run_page.attempts import write_page_of as write

    write(run_dirs, page, viewer)


def refresh_page(run_dir: Path) -> None:
    """Writes the page of a run that has ended anew, where it has one; a run writes its own.

    Raises:
        OSError, ValueError: it cannot be written.
    """
    from features.run_page.attempts import refresh_page as refresh

    refresh(run_dir)


def write_table(
    run_dir: Path,
    name: str,
    *,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | float | None]],
    note: str = "",
) -> None:
    """Writes a table of another feature's, which the page of the run shows from then on.

    Args:
        name: letters, digits and _; the table that it named before is replaced.
        rows: a cell for each heading: a text, a number, or None.
        note: a sentence below the table; "": none.

    Raises:
        OSError: it cannot be written.
    """
    from features.run_page.own_tables import write_table as write

    write(run_dir, name, {"title": title, "headings": headings, "rows": rows, "note": note})
