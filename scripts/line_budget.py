"""Counts the lines of code that a run can execute, folder by folder, and fails where there are too many.

A file and a function have a longest length, too. Counted are lines that hold code: blank lines, comments and docstrings
are free, so that nobody saves on documentation. Left out are tests, examples and scripts, which no run executes, and
custom/envs, the games to copy from.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Lines of code in all that is planned, and lines of any kind in a file and in a function.
BUDGET = 12_500
LONGEST_FILE = 550
LONGEST_FUNCTION = 60
COUNTED = ("main.py", "training/", "workers/", "data/", "custom/", "setup/")
NOT_COUNTED = ("custom/envs/",)
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def counted_files() -> list[Path]:
    """Lists the project's files that the budget is about, those not yet committed included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return [Path(f) for f in sorted(set(listed)) if f.startswith(COUNTED) and not f.startswith(NOT_COUNTED)]


def room_of(path: Path) -> str:
    """Names the folder that a file stands in; main.py stands for itself."""
    return path.parent.as_posix() if path.parent != Path() else path.name


def too_long(path: Path) -> Iterator[str]:
    """Says what in a file is over its length."""
    source = path.read_text()
    if (lines := len(source.splitlines())) > LONGEST_FILE:
        yield f"{path}: {lines} lines, over {LONGEST_FILE}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, over {LONGEST_FUNCTION}"


def main() -> int:
    """Prints the counts and what is too long; returns the exit code."""
    files = [path for path in counted_files() if path.exists()]
    rooms: Counter[str] = Counter()
    for path in files:
        rooms[room_of(path)] += len(code_lines(path.read_text()))
    for room, lines in rooms.items():
        print(f"{lines:6,}  {room}")
    print(f"{rooms.total():6,}  of {BUDGET:,} lines of code")
    problems = [text for path in files for text in too_long(path)]
    print("\n".join(problems), end="\n" if problems else "")
    return int(rooms.total() > BUDGET or bool(problems))


if __name__ == "__main__":
    sys.exit(main())
