"""Fails when the core exceeds the budget: what runs between the command line and the loss is meant to be read in an afternoon.

The core is main.py, training/, workers/ and data/; custom/ and examples/ are the user's, and are counted beside it.

Counted are lines of code: blank lines, comments and docstrings are free, so that nobody saves on documentation.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

BUDGET, LONGEST_FILE = 8000, 550
CORE = ("main.py", "training/", "workers/", "data/")
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source: str) -> int:
    """Lines that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    sources = {path: Path(path).read_text() for path in listed if not path.startswith("tests/")}
    lines = {path: code_lines(source) for path, source in sources.items()}
    code = sum(count for path, count in lines.items() if path.startswith(CORE))
    all_lines = {path: len(source.splitlines()) for path, source in sources.items()}
    print(
        f"{code} lines of code in the core, budget {BUDGET}; {sum(lines.values()) - code} in the rest outside tests "
        f"({sum(all_lines.values())} in all with documentation and blanks)"
    )
    long = {path: n for path, n in all_lines.items() if n > LONGEST_FILE}
    for path, n in long.items():
        print(f"{path}: {n} lines, over {LONGEST_FILE}")
    return int(code > BUDGET or bool(long))


if __name__ == "__main__":
    sys.exit(main())
