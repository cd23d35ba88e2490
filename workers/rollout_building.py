"""Builds the engine that `rollout.name` names, of those in workers/rollout/engine_registry.py."""

from typing import Any

from training.config import RolloutConfig
from workers.model.banned_tokens import banned_token_ids
from workers.model.builder import ModelSpec
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine_registry import load_engine_class


def build_rollout(config: RolloutConfig, spec: ModelSpec) -> BaseRollout:
    """Builds the engine; its file is imported only here."""
    # Not `BaseRollout`'s own constructor: an engine's takes the settings and the model.
    engine_class: Any = load_engine_class(config.name)
    banned = banned_token_ids(config, spec)
    if banned and not engine_class.bans_tokens:
        raise ValueError(
            f"rollout.name={config.name} cannot keep the {len(banned)} placeholders of pictures "
            f"and sounds that {spec.path} knows from being sampled; use hf or vllm"
        )
    return engine_class(config, spec)
