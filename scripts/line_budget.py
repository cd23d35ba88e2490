"""Fails when the code outside tests exceeds the budget: the whole is meant to be read in an afternoon.

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
    code = sum(code_lines(source) for source in sources.values())
    all_lines = {path: len(source.splitlines()) for path, source in sources.items()}
    print(
        f"{code} lines of code outside tests, budget {BUDGET} ({sum(all_lines.values())} with documentation and blanks)"
    )
    long = {path: n for path, n in all_lines.items() if n > LONGEST_FILE}
    for path, n in long.items():
        print(f"{path}: {n} lines, over {LONGEST_FILE}")
    return int(code > BUDGET or bool(long))


if __name__ == "__main__":
    sys.exit(main())
