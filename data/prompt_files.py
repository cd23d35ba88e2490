"""Reads files of prompts; errors name the file and the line.

A row of a file: `{"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "2 + 3 = ?"
}], "ability": "math", "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 0}}`.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet

SUFFIXES = (".parquet", ".json", ".jsonl")
# Git LFS leaves this in the place of a file that was not fetched.
LFS_START = b"version https://git-lfs"


def read_rows(file: str | Path) -> list[dict[str, Any]]:
    """Reads all rows of a parquet, json (a list of objects) or jsonl file as dicts.

    Raises:
        FileNotFoundError, ValueError: the file is not there, or does not hold rows.
    """
    path = Path(file).expanduser()
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{file}: a data file ends in {', '.join(SUFFIXES)}; this one in {path.suffix!r}; "
            "examples/prepare_gsm8k.py shows how rows are written"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"data file {str(file)!r} does not exist (looked for {path.resolve()})"
        )
    if is_lfs_pointer(path):
        raise ValueError(
            f"{path} is a pointer of Git LFS, not the file: fetch it by `git lfs pull`"
        )
    rows = _read_lines(path) if path.suffix == ".jsonl" else _read_whole(path)
    if isinstance(rows, dict):
        keys = ", ".join(map(str, rows))
        raise ValueError(f"{path} holds one object, with {keys}; a .json file holds a list of rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(
            f"{path} must hold rows, each an object: one a line in .jsonl, a list of them in .json"
        )
    if not rows:
        raise ValueError(f"{path} holds no rows")
    return rows


def is_lfs_pointer(path: Path) -> bool:
    """Checks whether a file is what Git LFS leaves in the place of one that was not fetched."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS_START)) == LFS_START
    except OSError:
        return False


def _read_whole(path: Path) -> Any:
    """Reads a parquet or json file."""
    try:
        if path.suffix == ".json":
            return json.loads(path.read_bytes())
        return pyarrow.parquet.read_table(path).to_pylist()
    except json.JSONDecodeError as error:
        fix = ""
        if error.msg == "Extra data":
            fix = "; the name of a file with an object a line ends in .jsonl"
        raise ValueError(f"{path} cannot be read: {error}{fix}") from error
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
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
            rows.append(_read_line(line, f"{path} line {number}"))
    return rows


def _read_line(line: bytes, where: str) -> Any:
    """Reads a row; ValueError says why a line is none."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}, column {error.colno}, cannot be read: {error.msg}; each line of a .jsonl "
            "file is a whole JSON object, and a list of objects over several lines is a .json file"
        ) from error
    except ValueError as error:
        raise ValueError(f"{where} cannot be read: {error}; save the file in UTF-8") from error
    except RecursionError as error:
        raise ValueError(f"{where} cannot be read: its lists are nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} holds {str(row)[:40]!r}, which is no JSON object")
    return row
