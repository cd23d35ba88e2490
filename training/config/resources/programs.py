"""Checks the programs that a configuration names; starts none of them."""

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from custom.env_calls import located, takes_keyword
from data.loading import load_extern_object
from training.config.resources.user_code import unusable_object
from training.config.schema.agent import OWN_PYTHON, EnvironmentChoice
from training.config.schema.ppo import PPOConfig

# A reward function of programs is called with these, by name.
OFFERED = ("task", "output", "conversations")


def check_program(key: str, choice: EnvironmentChoice) -> Iterator[str]:
    """Requires that a program is named once, and is there.

    Args:
        key: the section that names it.
    """
    if choice.name is not None or choice.path is not None:
        yield (
            f"{key}: name and path are an environment's, command and program name what plays by "
            "itself: give one of them"
        )
    yield from check_server(key)
    if choice.command:
        yield from _check_command(f"{key}.command", choice.command)
    if choice.program is not None:
        yield from _check_function(f"{key}.program", choice.program)


def check_server(key: str) -> Iterator[str]:
    """Requires the package by which programs are served."""
    if importlib.util.find_spec("aiohttp") is None:
        yield f"{key}: programs speak to a server, which needs aiohttp: pip install aiohttp"


def _check_command(key: str, words: tuple[str, ...]) -> Iterator[str]:
    """Requires that what a command runs is there."""
    if words[0] not in OWN_PYTHON and shutil.which(words[0]) is None:
        yield f"{key}: {words[0]!r} is no program that is installed here, nor a file that runs"
    for word in words[1:2]:
        if word.endswith(".py") and not os.path.exists(word):
            yield f"{key}: there is no file {word}"


def _check_function(key: str, source: str) -> Iterator[str]:
    """Requires that there is such an `async def` in a file."""
    path, _, name = source.rpartition(":")
    if not path.endswith(".py"):
        yield f"{key}={source} must be FILE.py:NAME, the name of an `async def` in the file"
        return
    problems = unusable_object(key, path, key, name)
    yield from problems
    if problems:
        return
    if importlib.util.find_spec("openai") is None:
        yield f"{key}: the function is given OpenAI's client: pip install openai"
    function = load_extern_object(path, name)
    if not inspect.iscoroutinefunction(function):
        yield f"{key}: {located(function, name)} must be `async def {name}(task, client)`"


def check_validated_programs(config: PPOConfig) -> Iterator[str]:
    """Requires rows for the validation of programs whose tasks are rows."""
    data = config.data
    reads_rows = any(
        choice.is_program and not choice.is_of_verifiers for choice in config.environments
    )
    if reads_rows and data.train_files and not data.val_files and config.agent.val_length:
        yield (
            f"agent.val_length={config.agent.val_length} validates a program without a task "
            "(TASK={}), and those that it trains on are rows of data.train_files: give "
            "data.val_files, or agent.val_length=0 for no validation"
        )


def check_reward_of_programs(function: Callable[..., Any]) -> Iterator[str]:
    """Requires that a reward function takes something of what a program did."""
    if not any(takes_keyword(function, name) for name in OFFERED):
        yield (
            f"custom_reward_function: {located(function, 'it')} takes none of "
            f"{', '.join(OFFERED)}, by which it is called for programs"
        )
