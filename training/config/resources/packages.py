"""Checks that the packages and the device that a configuration asks for are there."""

import importlib.util
import inspect
from collections.abc import Iterator

from training.config.resources.user_code import unknown_arguments
from training.config.schema.ppo import PPOConfig


def check_packages(config: PPOConfig) -> Iterator[str]:
    """Yields which package or device is missing; an engine's own class tells what it needs."""
    trainer = config.trainer
    if trainer.use_ray and importlib.util.find_spec("ray") is None:
        yield (
            "trainer.launcher=ray needs the package: pip install ray; one rank runs without it "
            "(trainer.launcher=local)"
        )
    elif trainer.use_ray and config.ray_kwargs.ray_init:
        yield from _check_ray_arguments(config)
    # The nodes of a cluster may have what this machine has not.
    runs_elsewhere = trainer.use_ray and config.ray_kwargs.joins_a_cluster
    if trainer.device == "cuda" and not runs_elsewhere and not _has_cuda():
        yield (
            "trainer.device=cuda: torch finds no CUDA device here; use cpu, or null for what "
            "there is"
        )


def _check_ray_arguments(config: PPOConfig) -> Iterator[str]:
    """Requires that ray.init takes its arguments; those with an underscore are private to Ray."""
    # Ray is there where the config asks for it.
    import ray

    parameters = [
        parameter
        for parameter in inspect.signature(ray.init).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    public = [name for name in config.ray_kwargs.ray_init if not name.startswith("_")]
    yield from unknown_arguments("ray_kwargs.ray_init", "ray.init", parameters, public)


def _has_cuda() -> bool:
    """Returns whether torch finds a CUDA device."""
    import torch

    return torch.cuda.is_available()
