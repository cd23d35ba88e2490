"""Builds the engine that `rollout.name` names, of those in workers/rollout/engine_registry.py."""

from typing import Any

from training.config.schema.rollout import RolloutConfig
from workers.model.builder import ModelSpec
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.engine_registry import load_engine_class


def build_rollout(config: RolloutConfig, spec: ModelSpec) -> BaseRollout:
    """Builds the engine; its file is imported only here."""
    # Not `BaseRollout`'s own constructor: an engine's takes the settings and the model.
    engine_class: Any = load_engine_class(config.name)
    return engine_class(config, spec)
