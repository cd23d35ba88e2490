"""Checks the environments and tools that a configuration names; makes none of them."""

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

from custom.env_calls import located, parameters_of
from custom.env_factory import environment_names, library_of, taker_of
from data.brought import folder_without
from data.loading import load_object
from training.config.resources.user_code import loading_failure, unusable_object, value_errors
from training.config.schema.agent import PASSED_AS_OBJECT, EnvironmentChoice
from training.config.schema.ppo import PPOConfig
from workers.rollout.kinds import kind_of_choice, kinds

log = logging.getLogger(__name__)


def check_agents(config: PPOConfig, own_data: bool = False) -> Iterator[str]:
    """Yields what is wrong with the environments and tools that the config names, if any.

    Args:
        own_data: datasets and environments are passed as objects.
    """
    agent = config.agent
    if not config.environments or (config.env_template and agent.environment.is_set):
        return
    for number, environment in enumerate(config.environments):
        key = f"env_template[{number}]" if config.env_template else "agent.environment"
        kind = kind_of_choice(config, environment)
        if kind is None:
            known = ", ".join(kind.name for kind in kinds())
            yield (
                f"{key} names a program, and no kind of episodes here plays it; kinds: {known}; "
                "name an environment, or put the feature back that plays programs"
            )
        elif kind.check is not None:
            yield from kind.load(kind.check)(key, environment, config, own_data)
    yield from _check_tools(config)


def check_environment(
    key: str, environment: EnvironmentChoice, config: PPOConfig, own_data: bool
) -> Iterator[str]:
    """Requires that an environment, whose section is called `key`, is named once and is there."""
    name = environment.name
    if own_data and name == PASSED_AS_OBJECT:
        return
    if name and environment.path:
        yield (
            f"{key}.name and {key}.path both name an environment: give one of them; the class in "
            f"a file is {key}.cls"
        )
    elif environment.path:
        source = f"{environment.path}:{environment.cls}"
        problems = unusable_object(
            f"{key}.path", environment.path, f"{key}.cls", environment.cls, _may_be_environment
        )
        yield from problems or _check_environment_object(key, source, environment)
    elif name == PASSED_AS_OBJECT:
        yield (
            f"{key}.name=given stands for an object that a program made: name its class, by "
            "name=PACKAGE.MODULE:CLASS or by path and cls"
        )
    elif name and not name.partition(":")[2]:
        yield (
            f"{key}.name={name} must be one of {environment_names()}; a class in a file is named "
            f"by {key}.path=FILE.py and {key}.cls=CLASS"
        )
    elif name and name.partition(":")[0] == "gym":
        yield f"{key}.name={name}: there is no gym. Did you mean 'gymnasium{name[3:]}'?"
    elif name and library_of(name) is None:
        yield from _check_environment_object(key, name, environment)
    elif not name and key.startswith("env_template"):
        yield f"{key} names no environment: give name, or path and cls"


def _check_environment_object(
    key: str, source: str, environment: EnvironmentChoice
) -> Iterator[str]:
    """Requires that an environment's class or function can be loaded, and takes `kwargs`.

    Args:
        source: FILE.py:CLASS or PACKAGE.MODULE:CLASS.
    """
    setting = f"{key}.name={environment.name}"
    folder = folder_without("libraries", source.partition(":")[0])
    if folder is not None:
        yield f"{setting} is played by {folder}, which is not here: put the folder back"
        return
    failures = list(loading_failure(setting, load_object, source, "environment"))
    yield from failures
    kwargs = dict(environment.kwargs)
    if environment.prompt_template is not None:
        kwargs["prompt_template"] = environment.prompt_template
    if failures:
        return
    make = load_object(source, "environment")
    if not callable(make):
        return
    unwritten = _unwritten_methods(make)
    if unwritten:
        yield f"{key}: {make.__name__} has no {' and no '.join(unwritten)}: write it in {source}"
        return
    yield from _check_takes_action(key, make)
    if not kwargs:
        yield from _check_needs_no_arguments(key, make)
        return
    for refusal in value_errors(taker_of, make, kwargs):
        yield f"{key}.kwargs: {refusal}"


def _may_be_environment(value: Any) -> bool:
    """Tells whether a class has what an environment has, or a function may make one."""
    if isinstance(value, type):
        return hasattr(value, "reset") and hasattr(value, "step")
    return inspect.isfunction(value)


def _unwritten_methods(make: Any) -> list[str]:
    """Lists which of `reset` and `step` a class does not have; none of a function."""
    if not isinstance(make, type) or hasattr(make, "__getattr__"):
        return []
    abstract = getattr(make, "__abstractmethods__", ())
    return [name for name in ("reset", "step") if name in abstract or not hasattr(make, name)]


def _check_takes_action(key: str, make: Any) -> Iterator[str]:
    """Requires that a class's `step` can be called with an action alone."""
    step: Any = getattr(make, "step", None)
    if not isinstance(make, type) or not inspect.isfunction(step):
        return
    signature = parameters_of(step)
    try:
        signature.bind(None, "")
    except TypeError as error:
        where = located(step, f"{make.__name__}.step")
        yield f"{key}: {where} takes {signature}; it is called as step(action): {error}"


def _check_needs_no_arguments(key: str, make: Callable[..., Any]) -> Iterator[str]:
    """Requires that an environment can be made without arguments."""
    try:
        signature = parameters_of(make)
    except ValueError:
        # A function that is written in C may have none.
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(make, "__name__", type(make).__name__)
        yield f"{key}.kwargs is empty, and {name} takes {signature}: {error}; give it there"


def _check_tools(config: PPOConfig) -> Iterator[str]:
    """Requires that tools can be loaded, and that the python tool has walls around it."""
    tools = config.agent.tools
    if not tools:
        return
    from custom.tools import load_tools

    yield from loading_failure(f"agent.tools=[{', '.join(tools)}]", load_tools, tools)
    if "python" in tools:
        yield from _check_walls(config.agent.tools_unsafe)


def _check_walls(unsafe: bool) -> Iterator[str]:
    """Requires that the kernel keeps what the python tool runs off files, network and processes."""
    from custom.tools.walls import missing_walls

    missing = "; ".join(missing_walls())
    if missing and not unsafe:
        yield (
            f"agent.tools: python runs what the policy writes, and on this machine {missing}; "
            "allow unprivileged user namespaces, or set agent.tools_unsafe=true"
        )
    elif missing:
        log.warning("agent.tools_unsafe=true, and on this machine %s", missing)
