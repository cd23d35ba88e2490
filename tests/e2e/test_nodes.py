"""Several nodes: two Ray nodes started on this machine hold one rank each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_training import read_steps

pytest.importorskip("ray")


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes with room for one rank each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
def test_two_nodes_train(two_nodes: str, tiny_task: Path, tmp_path: Path) -> None:
    argv = [
        "configs/tiny_prompts.yaml",
        f"data.train_files={tiny_task}/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"trainer.default_local_dir={tmp_path}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
        "trainer.nnodes=2",
        f"ray_kwargs.ray_init.address={two_nodes}",
    ]
    done = subprocess.run([sys.executable, "main.py", *argv], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 2]
