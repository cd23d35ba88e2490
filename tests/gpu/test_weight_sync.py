"""Weights of every kind of model into vLLM on CUDA.

Each test has an engine of its own, whose end takes vLLM's process groups with it: they are not to
run beside another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.test_engines import rounded, send
from tests.unit.test_rollout import CONFIG, build_engine, model_spec, perturb, worst_difference
from tests.unit.test_weight_sync import make_model

pytestmark = pytest.mark.gpu


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["biases", "tied", "qwen3_moe", "mixtral"])
def test_vllm_has_every_kind_of_model_whole_after_an_update(device, tmp_path, kind) -> None:
    pytest.importorskip("vllm")
    spec = model_spec(make_model(kind, tmp_path), device)
    policy = spec.causal_lm(trainable=True).eval()
    # One engine with sleep mode is all that a process can have.
    config = replace(CONFIG, dtype="bfloat16", gpu_memory_utilization=0.2, free_cache_engine=False)
    rollout = build_engine("vllm", spec, config)
    for seed in (1, 2):
        perturb(policy, seed)
        stale = worst_difference(rollout, rounded(policy), spec, 1.0)
        send(policy, rollout, torch.bfloat16)
        # In bfloat16 a router's close choice may fall the other way.
        agreement = worst_difference(rollout, rounded(policy), spec, 1.0)
        assert agreement < (0.1 if kind in ("biases", "tied") else 0.4)
        assert stale > 3 * agreement
