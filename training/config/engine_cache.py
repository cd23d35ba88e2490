"""How vLLM caches and reads prompts of a model, from the rollout's settings and its config.json.

Layers that keep a state need settings that fit each other, or vLLM does not start: a prefix of
theirs is kept at whole blocks (`mamba_cache_mode=align`), so that prompts must be read in parts.

Invariant: nothing is imported or downloaded; the engine and `--explain` ask the same function.
"""

from dataclasses import dataclass
from typing import Any

from training.config.row_layout import names_a_state, read_config_json
from training.config.schema.model import ModelConfig
from training.config.schema.rollout import RolloutConfig


@dataclass(frozen=True)
class CacheSettings:
    """Holds settings of vLLM's that follow.

    Attributes:
        prefix_caching: prefixes are computed once.
        chunked_prefill: prompts are read in parts.
        reason: why, as a sentence goes on that begins with "vLLM".
    """

    prefix_caching: bool
    chunked_prefill: bool
    reason: str


def cache_settings(
    rollout: RolloutConfig, content: dict[str, Any], *, on_cpu: bool
) -> CacheSettings:
    """Derives settings from `enable_prefix_caching`, `enable_chunked_prefill` and the model.

    Those of `engine_kwargs.vllm` go before the rollout's.

    Args:
        content: of the config.json of the language model.
    """
    own = rollout.engine_kwargs.get("vllm", {})
    wants_caching = own.get("enable_prefix_caching", rollout.enable_prefix_caching)
    wants_parts = own.get("enable_chunked_prefill", rollout.enable_chunked_prefill)
    if not names_a_state(content):
        # A prompt that is cut costs a CPU more than it saves.
        parts = wants_parts and not on_cpu
        return CacheSettings(wants_caching, parts, _plainly(wants_caching, parts))
    if on_cpu and "kv_lora_rank" in content:
        return CacheSettings(
            False,
            False,
            "computes shared prefixes anew, as on a CPU it caches none of DeepSeek's attention, "
            "and so no state of the layers beside it",
        )
    if wants_caching and wants_parts:
        return CacheSettings(
            True,
            True,
            "computes shared prefixes once and keeps its layers' states at whole blocks "
            "(mamba_cache_mode=align), for which prompts are read in parts",
        )
    if wants_caching:
        return CacheSettings(
            False,
            False,
            "computes shared prefixes anew, as its layers keep a state, which is cached only where "
            "prompts are read in parts (enable_chunked_prefill=true)",
        )
    parts = wants_parts and not on_cpu
    return CacheSettings(False, parts, _plainly(False, parts))


def _plainly(prefix_caching: bool, chunked_prefill: bool) -> str:
    """Says what the settings say."""
    prefixes = "once" if prefix_caching else "anew for each request"
    prompts = "in parts" if chunked_prefill else "whole"
    return f"computes shared prefixes {prefixes} and reads prompts {prompts}"


def describe_cache(model: ModelConfig, rollout: RolloutConfig, device: str | None) -> str | None:
    """Says what vLLM is told of a model whose layers keep a state; None: nothing of note.

    Args:
        device: `trainer.device`.
    """
    content = read_config_json(model)
    if rollout.name != "vllm" or content is None or not names_a_state(content):
        return None
    cache = cache_settings(rollout, content, on_cpu=device == "cpu")
    return f"rollout.name=vllm {cache.reason}"
