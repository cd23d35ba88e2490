"""Checks that there is a rollout engine of the configured name, and asks it what it needs."""

from collections.abc import Iterator

from data.loading import load_object
from training.config.resources.user_code import loading_failure, unusable_file, value_errors
from training.config.schema.ppo import PPOConfig
from workers.rollout.engine_registry import SETTING, engine_source, load_engine_class


def check_engine_name(config: PPOConfig) -> Iterator[str]:
    """Requires that there is an engine of the configured name."""
    name = config.actor_rollout_ref.rollout.name
    refusals = value_errors(engine_source, name)
    custom_file = config.custom_algorithm
    # A file that does not run is reported elsewhere; what it would have registered is not known.
    if refusals and custom_file and unusable_file("custom_algorithm", custom_file):
        return
    yield from refusals


def ask_engine_class(config: PPOConfig) -> Iterator[str]:
    """Yields what the class of an engine that there is has against the config.

    It imports the engine's file, which takes torch and transformers (`check_config` in
    workers/rollout/engine.py).
    """
    name = config.actor_rollout_ref.rollout.name
    failures = list(loading_failure(f"{SETTING}={name}", load_object, engine_source(name), SETTING))
    yield from failures
    if not failures:
        yield from load_engine_class(name).check_config(config)


def describe_unasked_engine(config: PPOConfig) -> str:
    """Explains that an engine's class was not asked, and when it will be."""
    name = config.actor_rollout_ref.rollout.name
    return (
        f"left unchecked: what the engine {SETTING}={name} needs and refuses, as --explain does "
        "not import it; a run asks it before it loads a model"
    )
