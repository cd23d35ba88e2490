"""A training step under Ray (one rank) against the same step in one process.

Same config, seeds, tokens and number of threads. Each measurement is a run of `main.py` of its own;
the two kinds take turns. SmolLM2-135M with vLLM where `make smollm2` has made its folder, else the
quickstart's tiny model, of which a step is too short to say much.

Run with nothing else on the machine: python -m tests.benchmarks.ray_vs_local [STEPS [ROUNDS]]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARM_UP = 2
TARGET = 1.10
PHASES = ("step", "gen", "update_actor", "update_weights")
SMOLLM2 = ["configs/smollm2_arithmetic.yaml", "data.max_response_length=64"]
TINY = ["configs/tiny_prompts.yaml", "data.train_batch_size=64"]


def task() -> list[str]:
    """The config to run; makes the quickstart's task where there is none at all."""
    if Path("outputs/smollm2/model").exists():
        return SMOLLM2
    if not Path("outputs/tiny_prompts/task/model").exists():
        subprocess.run(
            [
                sys.executable,
                "examples/prepare_tiny_prompts.py",
                "--out",
                "outputs/tiny_prompts/task",
            ],
            check=True,
        )
    return TINY


def run(config: list[str], launcher: str, steps: int) -> list[dict[str, Any]]:
    """Trains in a process of its own; the metrics of each step after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [
            *(sys.executable, "main.py", *config, f"trainer.launcher={launcher}"),
            f"trainer.default_local_dir={folder}",
            f"trainer.total_training_steps={WARM_UP + steps}",
            "trainer.deterministic=true",  # both then sample the same tokens
            "trainer.logger=file",
            "data.val_files=null",
        ]
        threads = {"OMP_NUM_THREADS": str(os.cpu_count())}  # which is what Ray's only rank gets
        subprocess.run(argv, check=True, env=os.environ | threads, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP:]


def main(steps: int, rounds: int) -> None:
    config = task()
    found: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    for number in range(rounds):
        for launcher in sorted(found, reverse=number % 2 == 1):
            found[launcher] += run(config, launcher, steps)
            print(
                f"round {number + 1}: {launcher} {found[launcher][-1]['timing_s/step']:.2f} s",
                flush=True,
            )
    lengths = {
        name: [step["response_length/mean"] for step in run_steps]
        for name, run_steps in found.items()
    }
    print(f"\n{config[0]}, {os.cpu_count()} threads, medians of {rounds * steps} steps")
    if lengths["local"] != lengths["ray"]:
        print("the two did not sample the same tokens: the ratio is a rough one")
    print("\n| | local | Ray, one rank | ratio | target |\n|---|---|---|---|---|")
    for phase in PHASES:
        local, ray = (
            statistics.median(step[f"timing_s/{phase}"] for step in found[name])
            for name in ("local", "ray")
        )
        target = f"at most {TARGET:.2f}" if phase == "step" else ""
        print(f"| {phase} | {local:.3f} s | {ray:.3f} s | {ray / local:.2f} | {target} |")


if __name__ == "__main__":
    main(*(int(value) for value in (sys.argv[1:] + ["5", "2"][len(sys.argv) - 1 :])))
