"""Shows which part of the code a training step executes: `make executed` runs two steps of GRPO with vLLM.

For every room it prints the lines of code, and of these the statements in functions that ran, under coverage. What only
defines something (imports, classes, tables) counts as code and not as executed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from coverage import Coverage

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.line_budget import code_lines, counted_files, room_of

PREPARE = [sys.executable, "examples/prepare_quickstart.py", "--out", "outputs/quickstart/task"]
RUN = [
    *("main.py", "configs/test_config.yaml", "actor_rollout_ref.rollout.name=vllm"),
    *("agent.val_length=0", "trainer.val_before_train=false", "trainer.resume_mode=disable"),
]


def record(folder: Path) -> dict[Path, set[int]]:
    """Runs two steps under coverage; returns the lines that ran, by file."""
    if not Path("outputs/quickstart/task/model").is_dir():
        subprocess.run(PREPARE, check=True)
    settings, data = folder / "coveragerc", folder / "data"
    settings.write_text(f"[run]\ndata_file = {data}\nconcurrency = thread\nsource = .\n")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *RUN]
    subprocess.run([*command, f"trainer.default_local_dir={folder / 'run'}"], check=True)
    coverage = Coverage(data_file=str(data), config_file=str(settings))
    coverage.load()
    seen = coverage.get_data()
    return {Path(file): set(seen.lines(file) or ()) for file in seen.measured_files()}


def executed(source: str, ran: set[int]) -> set[int]:
    """Returns the lines of code of statements that ran inside functions, and of those functions' signatures."""
    code, lines = code_lines(source), set[int]()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = {
            line
            for statement in ast.walk(function)
            if isinstance(statement, ast.stmt)
            and statement is not function
            and statement.lineno in ran
            for line in own_lines(statement)
        }
        if body:
            lines |= body | set(range(function.lineno, function.body[0].lineno))
    return lines & code


def own_lines(statement: ast.stmt) -> range:
    """Returns a statement's lines without those of the statements in it."""
    inner = [
        child.lineno
        for child in ast.walk(statement)
        if isinstance(child, ast.stmt) and child is not statement
    ]
    last = min(inner) - 1 if inner else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(last, statement.lineno) + 1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        lines_of = record(Path(folder))
    rooms: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for path in counted_files():
        source = path.read_text()
        rooms[room_of(path)] += len(code_lines(source))
        ran[room_of(path)] += len(executed(source, lines_of.get(path.resolve(), set())))
    print("\n| room | lines of code | executed by two steps |\n|---|---|---|")
    for room, lines in [*rooms.items(), ("all", rooms.total())]:
        own = ran.total() if room == "all" else ran[room]
        print(f"| {room} | {lines:,} | {own:,} ({own / lines:.0%}) |")


if __name__ == "__main__":
    main()
