"""Fails when the code outside tests exceeds the budget: the whole is meant to be read in an afternoon."""

from __future__ import annotations

import subprocess
import sys

BUDGET, LONGEST_FILE = 8000, 550


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    counts = {}
    for path in listed:
        if not path.startswith("tests/"):
            with open(path) as file:
                counts[path] = sum(1 for _ in file)
    total = sum(counts.values())
    print(f"{total} lines of Python outside tests, budget {BUDGET}")
    long = {path: n for path, n in counts.items() if n > LONGEST_FILE}
    for path, n in long.items():
        print(f"{path}: {n} lines, over {LONGEST_FILE}")
    return int(total > BUDGET or bool(long))


if __name__ == "__main__":
    sys.exit(main())
