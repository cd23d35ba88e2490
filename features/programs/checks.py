"""Checks the programs that a configuration names; starts none of them."""

import importlib.util
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

from custom.env_calls import located, takes_keyword
from data.loading import load_extern_object
from features.programs.helper_requests import unreadable_prompts
from features.programs.kind import owns_verifiers
from features.programs.settings import OWN_PYTHON, POLICY, ProgramsSettings
from training.config.resources.user_code import unusable_object
from training.config.schema.agent import EnvironmentChoice
from training.config.schema.ppo import PPOConfig
from training.config.side_services import side_names, tool_sources

# What a reward function of programs is called with, by name.
OFFERED = ("task", "output", "conversations", "task_dir")


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what settings of programs and of other sections contradict."""
    programs = config.section(ProgramsSettings)
    yield from _player_problems(programs, config)
    yield from unreadable_prompts(programs.helper_prompts)
    choices = config.environments
    played = [
        choice for choice in choices if choice.plays_by_itself or owns_verifiers(config, choice)
    ]
    yield from _host_problems(programs, config, bool(played))
    if played:
        yield from _played_problems(config)
    elif programs.train_models or programs.helper_prompts:
        yield (
            "programs.train_models and programs.helper_prompts tell a program's requests apart: "
            "set programs.command or programs.function"
        )
    elif programs.preload or programs.request_timeout_s is not None:
        yield (
            "programs.preload and programs.request_timeout_s are a program's: set programs.command"
        )
    for choice in choices:
        words = choice.command
        is_file = len(words) > 1 and words[1].endswith(".py")
        if programs.preload and not is_file and not owns_verifiers(config, choice):
            yield (
                "programs.preload forks a command of the form [PYTHON, FILE.py, ...]; "
                f"{list(words)} is none"
            )


def _player_problems(programs: ProgramsSettings, config: PPOConfig) -> Iterator[str]:
    """Yields what is set beside the program that plays for all, and cannot be."""
    agent = config.agent
    if programs.command and programs.function is not None:
        yield "programs.command and programs.function both name a program: give one of them"
    if programs.is_set and (agent.environment.is_set or config.env_template):
        yield (
            "programs.command and programs.function name the one thing that plays: take "
            "agent.environment and env_template out, or give the program as an entry of "
            "env_template"
        )
    if programs.is_set and agent.cls.path is not None:
        yield "agent.cls is an environment's agent, and programs.command is one itself: give one"
    if programs.is_set and (agent.tools or tool_sources(config)):
        yield (
            "agent.tools and mcp.servers are an environment's; a program sends its own tools with "
            "each request"
        )


def _played_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what does not go together with a program that plays."""
    if POLICY in side_names(config):
        yield (
            f"judges.models.{POLICY}: by this name programs ask the policy itself; give the model "
            "another one"
        )
    if config.agent.observation_loss_coef:
        yield (
            f"agent.observation_loss_coef={config.agent.observation_loss_coef} learns what "
            "environments say; of a program it is not known which of the words between answers "
            "are its own: 0"
        )


def _host_problems(
    programs: ProgramsSettings, config: PPOConfig, plays_programs: bool
) -> Iterator[str]:
    """Yields where the address at which programs find the policy is of no use to them."""
    if programs.host == "node" and not plays_programs:
        yield "programs.host=node is a program's: set programs.command or programs.function"
    elif programs.host == "node" and not config.trainer.use_ray:
        yield (
            "programs.host=node lets other nodes of a Ray cluster ask, and there is none: set "
            "trainer.launcher=ray, or take it out"
        )
    has_function = any(choice.program is not None for choice in config.environments)
    lives_in_ray = config.environment_home.isolation == "ray" and config.trainer.nnodes > 1
    if has_function and lives_in_ray and programs.host == "loopback":
        yield (
            "programs.function with isolation=ray may run on another node than the server that it "
            "asks: set programs.host=node, or isolation=process"
        )


def check_program(
    key: str, choice: EnvironmentChoice, config: PPOConfig, own_data: bool
) -> Iterator[str]:
    """Requires that a program is named once, and is there.

    Args:
        key: the section that names it, where `programs` does not.
        own_data: datasets are passed as objects.
    """
    function_key = f"{key}.program"
    if not config.env_template and config.section(ProgramsSettings).is_set:
        key = "programs"
        function_key = "programs.function"
    if choice.name is not None or choice.path is not None:
        yield (
            f"{key}: name and path are an environment's, command and program name what plays by "
            "itself: give one of them"
        )
    yield from check_server(key)
    if choice.command:
        yield from _check_command(f"{key}.command", choice.command)
    if choice.program is not None:
        yield from _check_function(function_key, choice.program)
    if not own_data:
        yield from _check_rows(config)


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


def _check_rows(config: PPOConfig) -> Iterator[str]:
    """Requires rows for the validation of programs whose tasks are rows."""
    data = config.data
    if data.train_files and not data.val_files and config.agent.val_length:
        yield (
            f"agent.val_length={config.agent.val_length} validates a program without a task "
            "(TASK={}), and those that it trains on are rows of data.train_files: give "
            "data.val_files, or agent.val_length=0 for no validation"
        )


def check_reward_of_programs(config: PPOConfig, function: Callable[..., Any]) -> Iterator[str]:
    """Requires that a reward function takes something of what a program did."""
    if not any(takes_keyword(function, name) for name in OFFERED):
        yield (
            f"custom_reward_function: {located(function, 'it')} takes none of "
            f"{', '.join(OFFERED)}, by which it is called for programs"
        )
