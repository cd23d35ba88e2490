"""Builds the engine that `rollout.name` names; an engine's package is imported only here."""

from training.config.settings import RolloutConfig
from workers.model.builder import ModelSpec
from workers.rollout.base import BaseRollout


def build_rollout(config: RolloutConfig, spec: ModelSpec) -> BaseRollout:
    """Builds the engine that `rollout.name` names."""
    if config.name == "vllm":
        from workers.vllm_rollout_spmd import vLLMRollout

        return vLLMRollout(config, spec)
    if config.name == "sglang":
        from workers.sglang_rollout import SGLangRollout

        return SGLangRollout(config, spec)
    from workers.hf_rollout import HFRollout

    return HFRollout(config, spec)
