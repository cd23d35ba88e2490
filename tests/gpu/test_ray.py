"""Ranks that Ray places on GPUs.

One against the same run in one process, two that share an engine.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("ray")

from tests.e2e.test_ray import FIXED, ROLLOUT, assert_same, fit
from tests.e2e.test_training import read_steps, tiny_config

pytestmark = pytest.mark.gpu


def test_a_rank_that_ray_places_gives_the_numbers_of_this_process(
    cluster: None,
    tiny_task,
    tmp_path,
    device,
) -> None:
    for launcher in ("local", "ray"):
        fit(
            tiny_config(
                tiny_task,
                tmp_path / launcher,
                *FIXED,
                f"trainer.device={device.type}",
                f"trainer.launcher={launcher}",
            )
        )
    assert_same(tmp_path / "local", tmp_path / "ray")


@pytest.mark.vllm
def test_an_engine_that_two_ranks_share_follows_the_policy(
    cluster: None,
    tiny_task,
    wide_model,
    tmp_path,
    device,
) -> None:
    """Each rank sees one GPU alone.

    The engine sleeps in every update, whose weights lie on the host between uses.
    """
    pytest.importorskip("vllm")
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    fit(
        tiny_config(
            tiny_task,
            tmp_path,
            f"actor_rollout_ref.model.path={wide_model}",
            "actor_rollout_ref.actor.fsdp_config.param_offload=true",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
            f"{ROLLOUT}.name=vllm",
            f"{ROLLOUT}.dtype=bfloat16",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            f"{ROLLOUT}.gpu_memory_utilization=0.3",
            f"{ROLLOUT}.n=2",
            "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=3",
            f"trainer.device={device.type}",
        )
    )
    for step in read_steps(tmp_path)[1:]:
        assert step["training/rollout_probs_diff_max"] < 0.1, "bfloat16 in the engine"
        assert step["response_length/mean"] > 1
