"""Checks who gives the order of the training rows."""

from collections.abc import Iterator

from training.config.samplers import named_sampler
from training.config.schema.ppo import PPOConfig


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields that the sampler is unknown, or that a class of the user's is named beside it."""
    sampler = config.data.sampler
    if sampler.class_path is not None and config.environments and not config.data.train_files:
        yield (
            f"data.sampler.class_path={sampler.class_path} gives the order of rows, and the "
            "environment plays seeds: give its tasks as rows by data.train_files, or take the "
            "sampler out"
        )
    if sampler.name is None:
        return
    try:
        named_sampler(sampler.name)
    except ValueError as error:
        yield str(error)
    if sampler.class_path is not None:
        yield (
            f"data.sampler.name={sampler.name} and data.sampler.class_path={sampler.class_path} "
            "both give the order of the rows: take one of them out"
        )
