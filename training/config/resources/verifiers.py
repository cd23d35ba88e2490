"""Checks that verifiers' environments can be played by verifiers; loads none of them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

from training.config.resources.programs import check_server
from training.config.schema.agent import EnvironmentChoice
from training.config.schema.ppo import PPOConfig

# The versions whose client and environments this project knows.
FIRST = (0, 4)
BEHIND = (0, 5)
# Seconds for an interpreter to name the version that it has.
MAX_S = 60.0
ASK = "import importlib.metadata as m; print(m.version('verifiers'))"
HINT = "`make verifiers-env` makes one, .venv-verifiers/bin/python"


def check_verifiers(key: str, choice: EnvironmentChoice, config: PPOConfig) -> Iterator[str]:
    """Requires an interpreter with verifiers, and settings that its episodes can have.

    Args:
        key: the section that names the environment.
    """
    yield from check_server(key)
    yield from _check_python(str(config.agent.verifiers.python))
    if choice.prompt_template is not None:
        yield (
            f"{key}.prompt_template words what an adapter says; agent.verifiers.python has "
            "verifiers speak for itself: take one of them out"
        )
    if config.custom_reward_function.path is not None:
        yield (
            "custom_reward_function.path: episodes that verifiers plays have their task's own "
            "rewards; take it out, or agent.verifiers.python"
        )
    if config.agent.program_reward != "stdout":
        yield (
            f"agent.program_reward={config.agent.program_reward} is for agent.command; "
            "verifiers says itself what its episodes earn: take it out"
        )
    yield from _check_block(key, choice)


def _check_block(key: str, choice: EnvironmentChoice) -> Iterator[str]:
    """Requires that `kwargs.env`, verifiers' own block of settings, is one."""
    block = choice.kwargs.get("env", {})
    if not isinstance(block, dict):
        yield f"{key}.kwargs.env={block!r} must be a mapping: verifiers' settings under --env"
    elif "taskset" in block:
        yield f"{key}.kwargs.env.taskset: a taskset's settings stand in {key}.kwargs itself"


def _check_python(python: str) -> Iterator[str]:
    """Requires that the interpreter runs, and has a version that fits."""
    key = f"agent.verifiers.python={python}"
    if shutil.which(python) is None:
        yield f"{key}: there is no such program; {HINT}"
        return
    version = _version(python, os.environ.get("PYTHONPATH", ""))
    first, behind = (".".join(map(str, bound)) for bound in (FIRST, BEHIND))
    if not version:
        yield f"{key} has no verifiers; {HINT}"
    elif not FIRST <= _numbers(version) < BEHIND:
        yield f"{key} has verifiers {version}; {first} or newer, older than {behind}, fits: {HINT}"


@cache
def _version(python: str, path: str) -> str:
    """Returns the version of verifiers that an interpreter has; "": none.

    Args:
        path: PYTHONPATH, on which the answer depends.
    """
    try:
        asked = subprocess.run(
            [python, "-c", ASK],
            capture_output=True,
            text=True,
            timeout=MAX_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def _numbers(version: str) -> tuple[int, ...]:
    """Returns a version's first two numbers."""
    numbers = []
    for part in version.split(".")[:2]:
        digits = "".join(character for character in part if character.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)
