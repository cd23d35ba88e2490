"""Several nodes: two Ray nodes on this machine.

They hold a rank each, or one the driver and the other the ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PROJECT
from tests.e2e.test_resume import steps_logged
from tests.e2e.test_training import read_steps, tiny_config
from training.building import build_trainer

ray = pytest.importorskip("ray")


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with room for one rank each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def command(cluster: Any, tiny_task: Path, tmp_path: Path, *overrides: str) -> list[str]:
    return [
        *(sys.executable, "main.py"),
        "configs/tiny_prompts.yaml",
        f"data.train_files={tiny_task}/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={tiny_task}/model",
        f"trainer.default_local_dir={tmp_path}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.total_training_steps=2",
        "trainer.nnodes=2",
        f"ray_kwargs.ray_init.address={cluster.address}",
        *overrides,
    ]


@pytest.mark.slow
def test_two_nodes_train(two_nodes: Any, tiny_task: Path, tmp_path: Path) -> None:
    argv = command(two_nodes, tiny_task, tmp_path)
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 2]


@pytest.fixture
def join() -> Iterator[Callable[[str], None]]:
    """Connects this process, on a node without GPUs, to one more node, which claims to have two.

    What is given runs before the other node starts, in a view of the file system of its own.
    """
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "num_gpus": 0, "include_dashboard": False},
    )
    nodes: list[subprocess.Popen[bytes]] = []

    def start_other(first: str) -> None:
        command = (
            f"{first} && exec ray start --block --address={cluster.address} "
            "--num-cpus=2 --num-gpus=2"
        )
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        words = ["unshare", "--mount", "bash", "-c", command]
        nodes.append(
            subprocess.Popen(
                words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
            )
        )
        ray.init(address=cluster.address, log_to_driver=False)
        deadline = time.monotonic() + 60.0
        while ray.cluster_resources().get("GPU") != 2:
            assert time.monotonic() < deadline, ray.nodes()
            time.sleep(0.2)

    yield start_other
    ray.shutdown()
    for node in nodes:
        node.terminate()
        node.wait(timeout=30)
    cluster.shutdown()


RANKS_ELSEWHERE = ("trainer.launcher=ray", "trainer.n_gpus_per_node=2", "data.val_files=null")
AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0, reason="a view of the file system of its own needs root"
)


@AS_ROOT
@pytest.mark.slow
def test_the_ranks_go_where_the_gpus_are_and_the_driver_needs_none(
    join: Callable[[str], None], tiny_task: Path, tmp_path: Path
) -> None:
    join("true")
    trainer = build_trainer(tiny_config(tiny_task, tmp_path, *RANKS_ELSEWHERE))
    try:
        trainer.init_workers()
        (other,) = [node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU")]
        placed = ray.util.placement_group_table(trainer.actor_rollout_wg.placement)
        assert placed["bundles"] == {0: {"CPU": 2.0, "GPU": 2.0}}
        assert (
            placed["bundles_to_node_id"]
            == {0: other}
            != {0: ray.get_runtime_context().get_node_id()}
        )
        trainer.fit()
    finally:
        trainer.shutdown()
    assert [step["step"] for step in read_steps(tmp_path)] == [1, 2]


@AS_ROOT
@pytest.mark.slow
def test_a_node_that_does_not_see_the_runs_folder_is_named_before_a_model_is_loaded(
    join: Callable[[str], None], tiny_task: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    join(f"mount -t tmpfs none {run_dir}")
    trainer = build_trainer(tiny_config(tiny_task, run_dir, *RANKS_ELSEWHERE))
    try:
        with pytest.raises(
            ValueError, match=r"trainer.default_local_dir: ranks 0, 1, .* do not see"
        ):
            trainer.init_workers()
    finally:
        trainer.shutdown()


@pytest.mark.slow
def test_a_node_that_leaves_is_waited_for(two_nodes: Any, tiny_task: Path, tmp_path: Path) -> None:
    more = (
        "trainer.total_training_steps=12",
        "trainer.save_freq=1",
        "trainer.max_restarts=2",
        "trainer.logger=file",
    )
    argv, log = command(two_nodes, tiny_task, tmp_path, *more), tmp_path / "stderr"
    with log.open("w") as stderr:
        run = subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.DEVNULL, stderr=stderr)
    try:
        while run.poll() is None and steps_logged(tmp_path) < 2:
            time.sleep(0.1)
        two_nodes.remove_node(next(iter(two_nodes.worker_nodes)), allow_graceful=False)
        while run.poll() is None and "restart 1 of 2" not in log.read_text():
            time.sleep(0.5)
        # The restarted run waits for it.
        time.sleep(15)
        assert run.poll() is None, log.read_text()[-3000:]
        two_nodes.add_node(num_cpus=1)
        assert run.wait(timeout=150) == 0, log.read_text()[-3000:]
    finally:
        run.terminate()
        run.wait(timeout=30)
    said = log.read_text()
    # Whichever was there.
    assert re.search(r"rank [01] of 2, role \w+, in \w+, step \d+, \w+", said), said[-3000:]
    assert "restart 2" not in said
    assert [step["step"] for step in read_steps(tmp_path)] == [*range(1, 13)]
