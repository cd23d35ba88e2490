"""Checks that trackers' packages are there, each in the Python that it runs in."""

import importlib.util
import subprocess
from collections.abc import Iterator, Sequence

from features.trackers.exchange import PACKAGES
from features.trackers.settings import TrackingSettings
from training.config import PPOConfig

# Prints those of its arguments that a Python cannot import.
FIND_MISSING = (
    "import importlib.util, sys; "
    "print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])"
)
PYTHON_START_S = 60.0


def problems(config: PPOConfig) -> Iterator[str]:
    """Yields which packages of the run's trackers are missing."""
    python = config.section(TrackingSettings).python
    yield from missing_packages(config.trainer.logger, python)


def missing_packages(loggers: Sequence[str], python: str | None) -> Iterator[str]:
    """Requires the packages of the loggers, each in the Python that it runs in.

    Args:
        python: that of trackers which are packages; None: this one.
    """
    packages = [name for name in loggers if name in PACKAGES]
    runs_here = ("tensorboard", *PACKAGES) if python is None else ("tensorboard",)
    own = [name for name in loggers if name in runs_here]
    missing = [name for name in own if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        yield (
            f"trainer.logger has {names}, which is not installed: `pip install {names}`, or take "
            "it out; where that would change other packages install it into another Python and "
            "name that one in trackers.python"
        )
    if python is not None and packages:
        yield from _missing_in(python, packages)


def _missing_in(python: str, packages: Sequence[str]) -> Iterator[str]:
    """Requires that a Python runs and finds the packages."""
    command = [python, "-c", FIND_MISSING, *packages]
    try:
        found = subprocess.run(
            command, capture_output=True, text=True, timeout=PYTHON_START_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield f"trackers.python={python} does not run: {error}"
        return
    missing = found.stdout.split()
    if missing:
        names = " ".join(missing)
        yield (
            f"trainer.logger has {names}, which trackers.python={python} does not find: "
            f"`{python} -m pip install {names}`, or take it out"
        )
