"""Tables that other features write for a run's page: RUN_DIR/page_tables/NAME.json.

    {"title": "Tasks", "headings": ["task", "reward"], "rows": [["row 3", 0.5]], "note": ""}

Invariant: a file that is damaged, or of another form, costs its table.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.config.plain_files import read_plain_text
from training.run.files import write_atomically

FOLDER = "page_tables"
# Of a table that a stranger may have written.
MOST_ROWS = 2000
MOST_COLUMNS = 40


def write_table(run_dir: Path, name: str, table: Mapping[str, Any]) -> None:
    """Writes a table.

    Raises:
        OSError: it cannot be written.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"{name}.json", json.dumps(table))


def read_tables(run_dir: Path) -> list[dict[str, Any]]:
    """Reads a run's tables, in the order of their names."""
    tables = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        try:
            table = _checked(json.loads(read_plain_text(path)))
        except (OSError, ValueError, RecursionError):
            continue
        tables.append(table)
    return tables


def _checked(table: Any) -> dict[str, Any]:
    """Returns a table's parts.

    Raises:
        ValueError: they are of another form.
    """
    if not isinstance(table, dict):
        raise ValueError("a table is a mapping")
    headings = table.get("headings")
    rows = table.get("rows")
    if not isinstance(headings, list) or not isinstance(rows, list):
        raise ValueError("a table has lists of headings and of rows")
    width = len(headings)
    if width > MOST_COLUMNS or any(not isinstance(r, list) or len(r) != width for r in rows):
        raise ValueError("each row has a cell for each heading")
    return {
        "title": str(table.get("title", "")),
        "headings": [str(heading) for heading in headings],
        "rows": [[_cell(cell) for cell in row] for row in rows[:MOST_ROWS]],
        "note": str(table.get("note", "")),
    }


def _cell(cell: Any) -> str | float | None:
    """Returns what stands in a cell: a text, a finite number, or nothing."""
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return cell if math.isfinite(cell) else None
    return str(cell)
