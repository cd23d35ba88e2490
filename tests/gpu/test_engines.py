"""Rollout engines on CUDA.

Log-probs are the trainer's after every update, seeds hold, sleeping gives memory back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.unit.test_actor_critic import make_update
from tests.unit.test_rollout import (
    CONFIG,
    build_engine,
    encode,
    model_spec,
    perturb,
    worst_difference,
)
from training.config import ActorConfig
from workers.dp_actor import DataParallelPPOActor
from workers.model.builder import ModelSpec
from workers.model.forward_settings import ForwardSettings
from workers.ranks.memory import expandable_segments
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import Sampling
from workers.weight_sync.manifest import iter_weights, weight_manifest

pytestmark = pytest.mark.gpu


def send(lm: nn.Module, rollout: BaseRollout, dtype: torch.dtype = torch.float32) -> None:
    rollout.update_weights(iter_weights(lm, dtype), weight_manifest(lm))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_hf_samples_with_the_trainers_log_probs_after_an_update(
    tiny_task, device, temperature
) -> None:
    spec = model_spec(tiny_task / "model", device)
    lm = spec.causal_lm(trainable=True).eval()
    rollout = build_engine("hf", spec)
    send(lm, rollout)
    assert worst_difference(rollout, lm, spec, temperature) < 1e-4
    optimizer = torch.optim.SGD(lm.parameters(), lr=1.0)
    DataParallelPPOActor(
        ActorConfig(), lm, optimizer, forward=ForwardSettings(device=device)
    ).update_policy(make_update())
    lm.eval()
    assert worst_difference(rollout, lm, spec, temperature) > 1e-3, (
        "the engine has a copy of its own"
    )
    send(lm, rollout)
    assert worst_difference(rollout, lm, spec, temperature) < 1e-4


def test_hf_gives_a_seed_the_same_sample_in_any_batch(tiny_task, device) -> None:
    spec = model_spec(tiny_task / "model", device)
    rollout = build_engine("hf", spec)
    send(spec.causal_lm(trainable=False), rollout)
    prompt, sampling = encode(spec)[0], Sampling(max_tokens=8)

    def sample(seeds: list[int]) -> dict[str, list[int]]:
        for seed in seeds:
            rollout.submit(str(seed), prompt, replace(sampling, seed=seed))
        return {c.request_id: c.token_ids for c in rollout.step()}

    together = sample([0, 1, 2, 3])
    assert len({tuple(ids) for ids in together.values()}) > 1
    assert {name: ids for seed in (3, 1, 0, 2) for name, ids in sample([seed]).items()} == together


@pytest.fixture(scope="module")
def vllm_engine(
    wide_model: Path, device: torch.device
) -> Iterator[tuple[BaseRollout, nn.Module, ModelSpec]]:
    """Yields vLLM in bfloat16, with the weights of a policy that moved away from the folder's."""
    pytest.importorskip("vllm")
    spec = model_spec(wide_model, device)
    policy = spec.causal_lm(trainable=True).eval()
    perturb(policy, seed=0)
    rollout = build_engine(
        "vllm", spec, replace(CONFIG, dtype="bfloat16", gpu_memory_utilization=0.2)
    )
    send(policy, rollout, torch.bfloat16)
    yield rollout, policy, spec


def rounded(policy: nn.Module) -> nn.Module:
    """Returns what the engine holds: the policy's weights in bfloat16."""
    return copy.deepcopy(policy).bfloat16()


@pytest.mark.vllm
def test_vllm_samples_with_the_trainers_log_probs_after_sleeping_and_an_update(vllm_engine) -> None:
    rollout, policy, spec = vllm_engine
    for seed in (1, 2):
        perturb(policy, seed)
        stale = worst_difference(rollout, rounded(policy), spec, 1.0)
        rollout.sleep()
        # As a worker does: the cache wakes last. Nothing of the old weights is left to fall back
        # on.
        rollout.wake_up("weights")
        send(policy, rollout, torch.bfloat16)
        rollout.wake_up("kv_cache")
        agreement = worst_difference(rollout, rounded(policy), spec, 1.0)
        assert agreement < 0.1, "bfloat16 on both sides"
        assert stale > 3 * agreement


@pytest.mark.vllm
def test_vllm_gives_a_seed_the_same_sample_whatever_the_global_generators_hold(vllm_engine) -> None:
    rollout, policy, spec = vllm_engine
    send(policy, rollout, torch.bfloat16)
    drawn = []
    for seed in (0, 1):
        np.random.seed(seed)
        torch.manual_seed(seed)
        rollout.begin()
        drawn.append(
            [completion.token_ids for completion in rollout.inference([encode(spec)[0]] * 8)]
        )
    assert drawn[0] == drawn[1]
    assert len({tuple(ids) for ids in drawn[0]}) > 1, "a prompt's samples differ all the same"


def test_updates_alone_have_memory_that_grows_in_place(device) -> None:
    """A tensor of the update lies in an expandable segment, what comes after it does not."""
    if device.type != "cuda":
        pytest.skip("of CUDA memory")

    def growing() -> bool:
        torch.cuda.empty_cache()
        tensor = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        segments = [s for s in torch.cuda.memory_snapshot() if s["address"] <= tensor.data_ptr()]
        return max(segments, key=lambda segment: segment["address"])["is_expandable"]

    with expandable_segments(device):
        assert growing()
    assert not growing()


@pytest.mark.vllm
def test_vllm_gives_its_memory_back_while_it_sleeps(vllm_engine, cuda_memory) -> None:
    rollout, _, _ = vllm_engine
    awake, _ = torch.cuda.mem_get_info(cuda_memory)
    rollout.sleep()
    asleep, total = torch.cuda.mem_get_info(cuda_memory)
    assert asleep - awake > 0.1 * total, "its share is 0.2 of the device"
    # What the trainer leaves in PyTorch's pool must not be in the engine's way.
    trainers = torch.empty(int(0.95 * asleep), dtype=torch.uint8, device=cuda_memory)
    del trainers
    rollout.wake_up()
    again, _ = torch.cuda.mem_get_info(cuda_memory)
    assert abs(again - awake) < 0.05 * total
