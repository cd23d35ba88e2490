"""What a config of agents and environments can still get wrong; `config_checks` asks here."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from custom.adapters import ENVIRONMENT_NAMES, LIBRARIES
from training.config.settings import CustomRewardFunctionConfig, EnvironmentChoice, PPOConfig

log = logging.getLogger(__name__)


def check_agents(config: PPOConfig) -> Iterator[str]:
    """Every problem of `agent` and `env_template`; nothing to say where no environment is named."""
    agent = config.agent
    if config.env_template and agent.environment.is_set:
        yield "env_template and agent.environment both name environments: give one of them"
        return
    if not config.environments:
        if agent.tools or agent.cls.path:
            yield "agent.tools and agent.cls need an environment: set agent.environment.name or .path"
        return
    for key, environment in _named(config):
        yield from _environment(key, environment)
    yield from _own_class(config)
    yield from _turns(config)
    yield from _reward(config.custom_reward_function)
    if agent.episodes_dir is not None:
        yield from unwritable("agent.episodes_dir", agent.episodes_dir)
    if agent.environment.isolation == "ray" and not config.trainer.use_ray:
        yield "agent.environment.isolation=ray needs trainer.launcher=ray; process has the same protection without it"
    if agent.environment.isolation == "thread" and agent.step_timeout_s is None:
        log.warning("agent.step_timeout_s=null with isolation=thread: an environment that hangs stops the run")
    if config.data.train_files or config.data.val_files:
        log.warning("data.train_files and val_files have no effect: episodes come from agent.environment")


def unwritable(key: str, folder: str) -> Iterator[str]:
    """What stands in the way of making a folder and writing into it."""
    path = Path(folder).absolute()
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not nearest.is_dir():
        yield f"{key}={folder}: {nearest} is not a folder; name another folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield f"{key}={folder}: {nearest} is not writable; name another folder"


def _named(config: PPOConfig) -> Iterator[tuple[str, EnvironmentChoice]]:
    if not config.env_template:
        yield "agent.environment", config.agent.environment
    else:
        yield from ((f"env_template[{i}]", entry) for i, entry in enumerate(config.environments))


def _environment(key: str, environment: EnvironmentChoice) -> Iterator[str]:
    if environment.name and environment.path:
        yield f"{key}.name and {key}.path both name an environment: give one of them"
    elif environment.path:
        if not Path(environment.path).is_file():
            yield f"{key}.path={environment.path} is not a file (seen from {Path.cwd()})"
        if environment.cls is None:
            yield f"{key}.cls is missing: which class of {environment.path}?"
    elif environment.name:
        kind, colon, rest = environment.name.partition(":")
        if not colon or not rest:
            yield f"{key}.name={environment.name} must be one of {ENVIRONMENT_NAMES}"
        elif kind in LIBRARIES and importlib.util.find_spec(kind) is None:
            yield f"{key}.name={environment.name} needs the package: pip install {LIBRARIES[kind]}"
    else:
        yield f"{key} names no environment: give name, or path and cls"


def _own_class(config: PPOConfig) -> Iterator[str]:
    own = config.agent.cls
    if own.path is not None and not Path(own.path).is_file():
        yield f"agent.cls.path={own.path} is not a file (seen from {Path.cwd()})"
    if (own.path is None) != (own.name is None):
        yield "agent.cls.path and agent.cls.name go together: the file, and the class in it"


def _turns(config: PPOConfig) -> Iterator[str]:
    agent, response = config.agent, config.data.max_response_length
    if agent.max_turn_tokens is not None and agent.max_turn_tokens > response:
        yield f"agent.max_turn_tokens={agent.max_turn_tokens} is above data.max_response_length={response}, which holds all turns"
    if config.data.return_raw_chat:
        log.warning("data.return_raw_chat has no effect with an environment: agent.episodes_dir keeps conversations")


def _reward(custom: CustomRewardFunctionConfig) -> Iterator[str]:
    """With an environment the reward function gets the trajectory, and the environment where it takes a second argument."""
    if custom.path is None or not Path(custom.path).is_file():
        return
    from data.loading import load_extern_object

    try:
        function = load_extern_object(custom.path, custom.name)
        parameters = inspect.signature(function).parameters.values()
    except Exception:  # reported where reward functions are loaded
        return
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(set(needed) - custom.reward_kwargs.keys()) > 2:
        yield (
            f"custom_reward_function.name={custom.name} takes ({', '.join(needed)}); with an environment it is called as "
            "reward_fn(trajectory) or reward_fn(trajectory, environment)"
        )
