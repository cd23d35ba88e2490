"""Checks that the packages and the device that a configuration asks for are there."""

import importlib.util
import inspect
import subprocess
from collections.abc import Iterator, Sequence

from training.config.resources.user_code import unknown_arguments
from training.config.schema.ppo import PPOConfig

# Loggers that are packages, which trainer.tracker_python may have.
TRACKER_PACKAGES = ("wandb", "mlflow", "swanlab", "trackio", "clearml")
# Prints those of its arguments that a Python cannot import.
FIND_MISSING = (
    "import importlib.util, sys; "
    "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
)
PYTHON_START_S = 60.0


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
    yield from _check_trackers(config)


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


def _check_trackers(config: PPOConfig) -> Iterator[str]:
    """Requires the packages of the loggers, each in the Python that it runs in."""
    trainer = config.trainer
    python = trainer.tracker_python
    packages = [name for name in trainer.logger if name in TRACKER_PACKAGES]
    runs_here = ("tensorboard", *TRACKER_PACKAGES) if python is None else ("tensorboard",)
    own = [name for name in trainer.logger if name in runs_here]
    missing = [name for name in own if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        yield (
            f"trainer.logger has {names}, which is not installed: `pip install {names}`, or take "
            "it out; where that would change other packages install it into another Python and "
            "name that one in trainer.tracker_python"
        )
    if python is not None and packages:
        yield from _check_tracker_python(python, packages)


def _check_tracker_python(python: str, packages: Sequence[str]) -> Iterator[str]:
    """Requires that a Python runs and finds the packages."""
    command = [python, "-c", FIND_MISSING, *packages]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=PYTHON_START_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield f"trainer.tracker_python={python} does not run: {error}"
        return
    missing = found.stdout.split()
    if missing:
        names = " ".join(missing)
        yield (
            f"trainer.logger has {names}, which trainer.tracker_python={python} does not find: "
            f"`{python} -m pip install {names}`, or take it out"
        )
