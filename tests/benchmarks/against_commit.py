"""The CPU seconds of a run here against those of an older commit, in interleaved pairs.

    python -m tests.benchmarks.against_commit OLD_TREE [--pairs 7] [CONFIG.yaml key=value ...]

Each pair runs the same command in both trees, one after the other, the order turned from pair to
pair. The quickstart's model must be there (`make quickstart` makes it). Prints the median ratio,
here / there, of the whole process's CPU seconds and of a step's: its own seconds, the start and
whatever else is not a step left out. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
QUICKSTART = (
    "configs/quickstart.yaml",
    "trainer.total_training_steps=12",
    "trainer.logger=[console,file]",
    "trainer.deterministic=true",
)
MODEL = PROJECT / "outputs/quickstart/task/model"


@dataclass(frozen=True)
class Cost:
    """What a run cost: CPU seconds of its processes, and the median seconds of a step."""

    cpu_seconds: float
    step_seconds: float


def run(tree: Path, words: list[str], folder: Path) -> Cost:
    """Runs the command in a tree; its folder is `folder`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    own = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "main.py", *words, *own],
        cwd=tree,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    steps = []
    for file in folder.rglob("metrics.jsonl"):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if "timing_s/step" in record:
                steps.append(record["timing_s/step"])
    return Cost(cpu_seconds=used, step_seconds=statistics.median(steps))


def main() -> None:
    """Runs the pairs and prints the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("old_tree", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    arguments, words = parser.parse_known_args()
    words = words or [*QUICKSTART, f"actor_rollout_ref.model.path={MODEL}"]
    trees = {"there": arguments.old_tree.resolve(), "here": PROJECT}
    ratios: dict[str, list[float]] = {"CPU seconds of the run": [], "seconds of a step": []}
    for pair in range(arguments.pairs):
        order = ["there", "here"] if pair % 2 == 0 else ["here", "there"]
        costs = {}
        for name in order:
            with tempfile.TemporaryDirectory() as folder:
                costs[name] = run(trees[name], words, Path(folder))
        here = costs["here"]
        there = costs["there"]
        ratios["CPU seconds of the run"].append(here.cpu_seconds / there.cpu_seconds)
        ratios["seconds of a step"].append(here.step_seconds / there.step_seconds)
        print(
            f"pair {pair + 1}: CPU {there.cpu_seconds:.1f} -> {here.cpu_seconds:.1f} s, "
            f"step {there.step_seconds:.3f} -> {here.step_seconds:.3f} s",
            flush=True,
        )
    for name, values in ratios.items():
        print(f"{name}: median {statistics.median(values):.3f} of {sorted(values)}")


if __name__ == "__main__":
    main()
