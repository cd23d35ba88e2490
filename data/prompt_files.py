"""Reads files of prompts; errors name the file and the line.

A row of a file: `{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2 + 3 = ?"
}], "ability": "math", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 0}}`.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet

SUFFIXES = (".parquet", ".json", ".jsonl")


def read_rows(file: str | Path) -> list[dict[str, Any]]:
    """Reads all rows of a parquet, json (a list of objects) or jsonl file as dicts.

    Raises:
        FileNotFoundError, ValueError: the file is not there, or does not hold rows.
    """
    path = Path(file).expanduser()
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{file}: a data file ends in {', '.join(SUFFIXES)}; this one in {path.suffix!r}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"data file {str(file)!r} does not exist (looked for {path.resolve()})"
        )
    if path.suffix == ".jsonl":
        rows = _read_lines(path)
    else:
        rows = _read_whole(path)
    if not rows or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path} must hold rows, each an object: one a line in .jsonl, a list of them in .json"
        )
    return rows


def _read_whole(path: Path) -> Any:
    """Reads a parquet or json file."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_bytes())
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _read_lines(path: Path) -> list[Any]:
    """Reads a jsonl file; blank lines are left out."""
    try:
        # As bytes, because a decoder of the whole file does not know the line it fails in.
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"{path} line {number} cannot be read: {error}") from error
    return rows
