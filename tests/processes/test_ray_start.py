"""A signal that comes while Ray starts ends the run as one that comes later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import PROJECT

pytest.importorskip("ray")
# Marks the moment from which Ray's own handler is there.
START = """
import sys
from pathlib import Path
import main
import ray

connect = ray.init

def init(**settings):
    Path(sys.argv[1]).write_text("Ray starts")
    return connect(**settings)

ray.init = init
sys.exit(main.main(sys.argv[2:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("after_s", [0.3, 1.5])
def test_sigterm_while_ray_starts_ends_the_run_with_143(
    tiny_task: Path, tmp_path: Path, after_s: float
) -> None:
    begun = tmp_path / "begun"
    argv = [
        "configs/tiny_prompts.yaml",
        f"data.train_files={tiny_task}/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.launcher=ray",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", START, str(begun), *argv],
        cwd=PROJECT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    while process.poll() is None and not begun.exists():
        time.sleep(0.02)
    time.sleep(after_s)
    descendants = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said[-3000:]
    _, alive = psutil.wait_procs(descendants, timeout=10)
    assert not [child for child in alive if _runs(child)]


def _runs(process: psutil.Process) -> bool:
    """Tell a running process from an ended one that nobody has waited for.

    In a container whose first process reaps no orphans, an ended one keeps its
    entry as a zombie.
    """
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
