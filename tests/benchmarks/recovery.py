"""How long a run is without a step when a rank is killed.

From SIGKILL to the next step that is finished.

Two ranks by Ray on the tiny task of `ray_vs_local`, a checkpoint a step, `trainer.max_restarts=1`.

    noticed     until the run says what happened and is started again
    ready       until it goes on from its checkpoint: Python, Ray, models and engines are up
    step        until the first step after that is finished

Run with nothing else on the machine: python -m tests.benchmarks.recovery [--engine vllm]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.benchmarks.ray_vs_local import task

PATIENCE_S = 300.0


def wait_for(there: Callable[[], object]) -> float:
    """Waits until something is there; returns the time."""
    end = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.02)
    return time.monotonic()


def main(engine: str) -> None:
    """Kills a rank, and prints the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, log = Path(folder) / "metrics.jsonl", Path(folder) / "stderr"
        argv = [
            *(sys.executable, "main.py", *task(), f"actor_rollout_ref.rollout.name={engine}"),
            *(
                "trainer.launcher=ray",
                "trainer.n_gpus_per_node=2",
                "trainer.max_restarts=1",
                "trainer.save_freq=1",
            ),
            *(f"trainer.default_local_dir={folder}", "trainer.logger=file", "data.val_files=null"),
            "trainer.total_training_steps=1000",
        ]
        with log.open("w") as stderr:
            run = psutil.Popen(argv, stdout=subprocess.DEVNULL, stderr=stderr)

        def steps() -> int:
            return len(metrics.read_text().splitlines()) if metrics.exists() else 0

        try:
            wait_for(lambda: steps() >= 4)
            ranks = [
                p for p in run.children(recursive=True) if "WorkerHost" in " ".join(p.cmdline())
            ]
            killed = time.monotonic()
            ranks[-1].kill()
            noticed = wait_for(lambda: "restart 1 of 1" in log.read_text())
            ready = wait_for(lambda: "resumed from" in log.read_text())
            before = steps()
            step = wait_for(lambda: steps() > before)
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait(60)
    print(f"noticed after {noticed - killed:.1f} s, ready after {ready - killed:.1f} s")
    print(f"SIGKILL to the next finished step: {step - killed:.1f} s, {engine}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="vllm")
    main(**vars(parser.parse_args()))
