"""Proves that two checkouts train bitwise alike: the same deterministic runs in both, compared.

    python scripts/same_numbers.py OLD_TREE NEW_TREE [--runs NAME ... | --fast]
        [--out FOLDER] [--python PYTHON] [--again]

Compared are every metric of every step but time, memory and load, all weights and optimizer tensors
of the last checkpoint, and the dumped episodes. Prints a line a run, then the metrics that are new
or gone; the exit code is 1 where anything differs. A new tree is given the old one's settings.
--fast leaves out the runs with vLLM or Ray, which take most of the time.

    OUT/files/            the models, made once, with OLD_TREE's examples
    OUT/COMMIT/RUN/       a run of a tree without uncommitted changes, made once
    OUT/changed-HASH/RUN/ a run of any other tree, or with --again; made anew each time

Invariant: a run that is there ended well and was made with today's settings.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.same_compare import RunDifferences, compare_runs
from scripts.same_runs import LIMIT_S, RUNS, ComparedRun, environment, prepare, texts_digest

STARTER = Path(__file__).resolve().parent / "same_starts.py"
# In a run's folder: how it was made.
RESULT = "same_numbers.json"
LOG = "log.txt"
# Further differences of a run that are shown.
MORE_SHOWN = 2


@dataclass(frozen=True, kw_only=True)
class Tree:
    """Describes a checkout and where its runs lie.

    Attributes:
        path: its folder.
        results: the folder of its runs.
        is_kept: whether a run that lies there is used again.
        files: the models and users' files.
        python: the interpreter of its runs.
    """

    path: Path
    results: Path
    is_kept: bool
    files: Path
    python: str

    def folder(self, run: ComparedRun) -> Path:
        """Returns the folder of a run."""
        return self.results / run.name

    def argvs(self, run: ComparedRun) -> list[list[str]]:
        """Returns the arguments of each start of a run."""
        folder = self.folder(run)
        return [run.argv(folder, self.files, steps) for steps in run.starts]

    def result(self, run: ComparedRun) -> dict[str, Any] | None:
        """Reads how a run ended well; None where it did not, or had other settings."""
        path = self.folder(run) / RESULT
        if not path.is_file():
            return None
        result = json.loads(path.read_text())
        is_of_today = result["argvs"] == self.argvs(run) and result["texts"] == texts_digest()
        return result if is_of_today else None


def describe_tree(path: Path, out: Path, python: str, *, again: bool) -> Tree:
    """Names a tree by its commit, or, with uncommitted changes, by its folder."""
    path = path.resolve()
    commit = _git(path, "rev-parse", "HEAD")
    changes = _git(path, "status", "--porcelain")
    is_kept = bool(commit) and changes == "" and not again
    if is_kept and commit is not None:
        name = commit[:12]
    else:
        name = "changed-" + hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return Tree(path=path, results=out / name, is_kept=is_kept, files=out / "files", python=python)


def _git(tree: Path, *words: str) -> str | None:
    """Asks git about a tree; None where it does not answer."""
    done = subprocess.run(["git", "-C", str(tree), *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


# Making runs.


def make_missing(tree: Tree, runs: list[ComparedRun]) -> None:
    """Makes those runs of a tree that are not kept; one that fails leaves its log alone."""
    waiting = []
    for run in runs:
        if tree.is_kept and tree.result(run) is not None:
            continue
        shutil.rmtree(tree.folder(run), ignore_errors=True)
        tree.folder(run).mkdir(parents=True)
        waiting.append(run)
    together = [run for run in waiting if not run.alone]
    if together:
        _make_together(tree, together)
    for run in waiting:
        if run.alone:
            _make_alone(tree, run)


def _make_together(tree: Tree, runs: list[ComparedRun]) -> None:
    """Makes runs one after another, forked from one Python."""
    jobs = []
    run_of_job = []
    for run in runs:
        for argv in tree.argvs(run):
            jobs.append({"argv": argv, "log": str(tree.folder(run) / LOG)})
            run_of_job.append(run)
    jobs_file = tree.results / "jobs.json"
    jobs_file.write_text(json.dumps(jobs))
    command = [tree.python, str(STARTER), str(jobs_file), str(LIMIT_S)]
    endings: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with subprocess.Popen(
        command, cwd=tree.path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for run, line in zip(run_of_job, process.stdout, strict=False):
            endings[run.name].append(json.loads(line))
            if len(endings[run.name]) == len(run.starts):
                keep(tree, run, endings[run.name])


def _make_alone(tree: Tree, run: ComparedRun) -> None:
    """Makes a run with a Python of its own for each start."""
    endings = []
    for argv in tree.argvs(run):
        began = time.monotonic()
        with (tree.folder(run) / LOG).open("a") as log:
            exit_code = _run_main(tree, argv, log)
        seconds = round(time.monotonic() - began, 1)
        endings.append({"exit_code": exit_code, "seconds": seconds})
    keep(tree, run, endings)


def _run_main(tree: Tree, argv: list[str], log: IO[str]) -> int | None:
    """Runs `main.py` in a tree; returns its exit code, None where it took too long."""
    command = [tree.python, "main.py", *argv]
    try:
        done = subprocess.run(
            command,
            cwd=tree.path,
            env=environment(),
            stdout=log,
            stderr=log,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def keep(tree: Tree, run: ComparedRun, endings: list[dict[str, Any]]) -> None:
    """Writes how a run was made, where all of its starts ended well; says so."""
    seconds = sum(ending["seconds"] for ending in endings)
    codes = [ending["exit_code"] for ending in endings]
    print(f"  made {run.name} in {tree.path}: {seconds:.1f} s, exit codes {codes}", flush=True)
    if any(codes):
        return
    result = {"argvs": tree.argvs(run), "texts": texts_digest(), "seconds": seconds}
    (tree.folder(run) / RESULT).write_text(json.dumps(result))


# Comparing them.


def compare(old: Tree, new: Tree, run: ComparedRun) -> RunDifferences:
    """Compares a run in two trees; one that failed is a difference."""
    failed = [tree for tree in (old, new) if tree.result(run) is None]
    if failed:
        return RunDifferences(
            differences=[f"it failed, see {tree.folder(run) / LOG}" for tree in failed]
        )
    return compare_runs(old.folder(run), new.folder(run), run.last_step)


def lines_of(run: ComparedRun, comparison: RunDifferences) -> Iterator[str]:
    """Writes what came of a run: equal, or what differs first."""
    if not comparison.differences:
        counts = ", ".join(f"{count} {kind}" for kind, count in comparison.compared.items())
        yield f"{run.name}: equal ({counts})"
        return
    first, *more = comparison.differences
    yield f"{run.name}: DIFFERS: {first}"
    for difference in more[:MORE_SHOWN]:
        yield f"    {difference}"
    if len(more) > MORE_SHOWN:
        yield f"    and {len(more) - MORE_SHOWN} further differences"


def lines_of_names(comparisons: dict[str, RunDifferences]) -> Iterator[str]:
    """Writes the metrics that are new or gone, with how many runs have them."""
    for kind in ("new", "gone"):
        runs_with: dict[str, list[str]] = defaultdict(list)
        for run, comparison in comparisons.items():
            names = comparison.new if kind == "new" else comparison.gone
            for name in names:
                runs_with[name].append(run)
        for name, runs in sorted(runs_with.items()):
            yield f"{kind}: {name} (in {len(runs)} runs, such as {runs[0]})"


def main(argv: list[str]) -> int:
    """Makes what is missing and compares; returns the exit code."""
    args = parse_arguments(argv)
    runs = [RUNS[name] for name in args.runs or RUNS]
    if args.fast:
        runs = [run for run in runs if not run.alone]
    out = args.out.resolve()
    old = describe_tree(args.old, out, args.python, again=False)
    new = describe_tree(args.new, out, args.python, again=args.again)
    prepare(old.files, old.path, args.python)
    make_missing(old, runs)
    make_missing(new, runs)
    comparisons = {run.name: compare(old, new, run) for run in runs}
    for run in runs:
        for line in lines_of(run, comparisons[run.name]):
            print(line)
    for line in lines_of_names(comparisons):
        print(line)
    differing = [name for name, found in comparisons.items() if found.differences]
    print(f"{len(runs) - len(differing)} of {len(runs)} runs are equal")
    return 1 if differing else 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD_TREE")
    parser.add_argument("new", type=Path, metavar="NEW_TREE")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), metavar="NAME")
    parser.add_argument("--fast", action="store_true", help="without vLLM and Ray")
    parser.add_argument("--out", type=Path, default=Path("outputs/same_numbers"))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--again", action="store_true", help="make the new tree's runs, whatever is kept"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
