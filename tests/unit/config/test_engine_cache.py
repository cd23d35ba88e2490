"""Settings of vLLM's cache that follow from the model and the rollout's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.config import ModelConfig, RolloutConfig
from training.config.engine_cache import cache_settings, describe_cache

STATES = {"model_type": "falcon_h1", "mamba_d_state": 16}
PLAIN = {"model_type": "llama"}


def passed_on(**settings: bool) -> dict[str, Any]:
    """Makes settings of the rollout that hand these on to vLLM."""
    return {"engine_kwargs": {"vllm": settings}}


@pytest.mark.parametrize(
    ("content", "settings", "on_cpu", "caching", "parts"),
    [
        (PLAIN, {}, True, True, False),
        (PLAIN, {}, False, True, True),
        (PLAIN, {"enable_prefix_caching": False}, False, False, True),
        # A state is cached only where prompts are read in parts.
        (STATES, {}, True, True, True),
        (STATES, {}, False, True, True),
        (STATES, {"enable_chunked_prefill": False}, True, False, False),
        (STATES, {"enable_chunked_prefill": False}, False, False, False),
        (STATES, {"enable_prefix_caching": False}, True, False, False),
        (STATES, {"enable_prefix_caching": False}, False, False, True),
        # Of DeepSeek's attention vLLM caches nothing on a CPU.
        (STATES | {"kv_lora_rank": 512}, {}, True, False, False),
        (STATES | {"kv_lora_rank": 512}, {}, False, True, True),
        # What is passed on goes before the rollout's.
        (STATES, passed_on(enable_prefix_caching=False), True, False, False),
        (STATES, passed_on(enable_chunked_prefill=False), False, False, False),
    ],
)
def test_prefixes_and_parts_fit_the_models_layers(
    content: dict[str, Any], settings: dict[str, Any], on_cpu: bool, caching: bool, parts: bool
) -> None:
    found = cache_settings(RolloutConfig(**settings), content, on_cpu=on_cpu)
    assert (found.prefix_caching, found.chunked_prefill) == (caching, parts)


def test_a_line_says_what_vllm_is_told_of_a_model_that_keeps_a_state(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(STATES))
    model = ModelConfig(path=str(tmp_path))
    line = describe_cache(model, RolloutConfig(), "cpu") or ""
    assert line.startswith("rollout.name=vllm computes shared prefixes once and keeps its layers'")
    whole = RolloutConfig(enable_chunked_prefill=False)
    assert "as its layers keep a state" in (describe_cache(model, whole, None) or "")
    assert describe_cache(model, RolloutConfig(name="hf"), "cpu") is None
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    assert describe_cache(model, RolloutConfig(), "cpu") is None
