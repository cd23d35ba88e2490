"""Checks that the reward function and the reward manager are there, and take their arguments."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from custom.env_calls import located, parameters_of, takes_keyword
from data.loading import load_extern_object
from training.config.resources.user_code import (
    unknown_arguments,
    unusable_file,
    unusable_object,
    value_errors,
)
from training.config.schema.ppo import PPOConfig
from training.config.schema.reward import CustomRewardFunctionConfig
from workers.rollout.kinds import kind_of_choice

# The trainer passes these to a reward manager; everything else comes from reward_kwargs.
ARGUMENTS_OF_MANAGERS = ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
# Reward managers that are there and ask nothing of a config, which is known without importing them.
MANAGERS_WITHOUT_NEEDS = ("naive", "dapo", "prime")
# Managers call a scoring function with these, beside reward_kwargs.
ROW_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
CALLED_WITH = {
    **dict.fromkeys(("naive", "dapo", "prime"), ROW_ARGUMENTS),
    "batch": tuple(f"{name}s" for name in ROW_ARGUMENTS),
}
# With an environment a reward function takes the trajectory, and the environment if it wants that.
MOST_ARGUMENTS_WITH_ENVIRONMENT = 2


def check_reward(config: PPOConfig, own_data: bool = False) -> Iterator[str]:
    """Requires that the scoring function loads, and that the manager finds what it needs.

    The function's file may register the manager, and a manager may hand its reward_kwargs on to
    the function.

    Args:
        own_data: datasets and environments are passed as objects: only the trainer then knows
            what the function is to score, and tries it.
    """
    settings = config.custom_reward_function
    problems = []
    if settings.path is not None and not registers_manager_alone(config):
        problems += _function_problems(config, settings.path)
    problems += _manager_problems(config)
    yield from problems
    if not problems:
        yield from _check_reward_arguments(config, own_data)


def _function_problems(config: PPOConfig, path: str) -> list[str]:
    """Returns why the scoring function cannot be taken from its file, if so."""
    key = "custom_reward_function.name"
    name = config.custom_reward_function.name
    is_default = name == CustomRewardFunctionConfig().name
    found = unusable_object("custom_reward_function.path", path, key, name, fits=inspect.isfunction)
    if is_default and config.environments:
        # An environment's is of no fixed name, but of other arguments than a prompt's.
        advice = (
            "; with an environment define `def reward_fn(trajectory)` there, and set "
            f"{key}=reward_fn, or the name that yours has"
        )
        return [each + advice if each.startswith(f"{key}=") else each for each in found]
    return found


def registers_manager_alone(config: PPOConfig) -> bool:
    """Checks whether the scoring function's file has the reward manager, and no such function.

    The manager is then made without one.
    """
    settings = config.custom_reward_function
    manager = config.reward_model.reward_manager
    names_another = settings.name != CustomRewardFunctionConfig().name
    if settings.path is None or names_another or manager in MANAGERS_WITHOUT_NEEDS:
        return False
    if unusable_file("custom_reward_function.path", settings.path):
        return False
    if not value_errors(load_extern_object, settings.path, settings.name):
        return False
    # Imports torch: late.
    from custom.reward_manager import REWARD_MANAGER_REGISTRY

    manager_class = REWARD_MANAGER_REGISTRY.get(manager)
    if manager_class is None:
        return False
    return Path(inspect.getfile(manager_class)) == Path(settings.path).expanduser().resolve()


def _manager_problems(config: PPOConfig) -> list[str]:
    """Returns why there is no such reward manager, or what its class says the config lacks."""
    name = config.reward_model.reward_manager
    if name in MANAGERS_WITHOUT_NEEDS:
        return []
    # Imports torch: late.
    from custom.reward_manager import get_reward_manager_cls

    if name == "gdpo" and value_errors(get_reward_manager_cls, name):
        return [
            "reward_model.reward_manager=gdpo: every manager hands on what the reward function "
            "gives beside its score; leave it at naive, and set algorithm.adv_estimator=gdpo and "
            "algorithm.gdpo_reward_keys"
        ]
    refusals = value_errors(get_reward_manager_cls, name)
    if refusals:
        return refusals
    check = getattr(get_reward_manager_cls(name), "check_config", None)
    return list(check(config)) if callable(check) else []


def _own_reward_checks(config: PPOConfig) -> list[Callable[..., Iterator[str]]]:
    """Lists the checks of reward functions that kinds of the config's environments bring."""
    chosen = [kind_of_choice(config, choice) for choice in config.environments]
    own = {kind.check_reward: kind for kind in chosen if kind is not None and kind.check_reward}
    return [kind.load(place) for place, kind in own.items()]


def _check_reward_arguments(config: PPOConfig, own_data: bool) -> Iterator[str]:
    """Requires that the scoring function and the manager take their reward_kwargs."""
    from custom.reward_score import default_compute_score

    settings = config.custom_reward_function
    function: Callable[..., Any] = default_compute_score
    function_name = "default_compute_score"
    has_function = settings.path is not None and not registers_manager_alone(config)
    if has_function:
        function = load_extern_object(str(settings.path), settings.name)
        function_name = settings.name
    parameters = list(inspect.signature(function).parameters.values())
    if has_function:
        own_checks = _own_reward_checks(config)
        if own_checks:
            for check in own_checks:
                yield from check(config, function)
        elif config.environments and not config.plays_dataset_rows:
            yield from _check_trajectory_function(config, function)
        elif not own_data:
            yield from _check_row_function(config, function)
        yield from _check_row_arguments(config, "custom_reward_function.reward_kwargs")
        yield from unknown_arguments(
            "custom_reward_function.reward_kwargs",
            function_name,
            parameters,
            settings.reward_kwargs,
        )
    yield from _check_row_arguments(config, "reward_model.reward_kwargs")
    if config.reward_model.reward_kwargs:
        yield from _check_manager_arguments(config, function_name, parameters)


def _check_row_arguments(config: PPOConfig, key: str) -> Iterator[str]:
    """Requires that reward_kwargs name none of what a manager tells a function of each row."""
    section = key.partition(".")[0]
    given = config[section].reward_kwargs
    rows = CALLED_WITH.get(config.reward_model.reward_manager, ())
    if config.environments and not config.plays_dataset_rows:
        rows = ()
    for name in rows:
        if name in given:
            yield (
                f"{key}.{name}: the reward manager gives the function each row's own {name}, "
                "which would take its place; give your argument another name"
            )


def _check_manager_arguments(
    config: PPOConfig, function_name: str, function_parameters: list[inspect.Parameter]
) -> Iterator[str]:
    """Requires that the manager takes its reward_kwargs, or hands them on to the function."""
    # Imports torch: late.
    from custom.reward_manager import NaiveRewardManager, get_reward_manager_cls

    manager = get_reward_manager_cls(config.reward_model.reward_manager)
    taker_name = manager.__name__
    parameters = [
        parameter
        for parameter in inspect.signature(manager).parameters.values()
        if parameter.name not in ARGUMENTS_OF_MANAGERS
    ]
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if issubclass(manager, NaiveRewardManager) and hands_on:
        taker_name = function_name
        own_parameters = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        parameters = own_parameters + function_parameters
    yield from unknown_arguments(
        "reward_model.reward_kwargs",
        taker_name,
        parameters,
        config.reward_model.reward_kwargs,
    )


def _check_row_function(config: PPOConfig, function: Callable[..., Any]) -> Iterator[str]:
    """Requires that a scoring function takes what the reward manager calls it with."""
    settings = config.custom_reward_function
    called_with = CALLED_WITH.get(config.reward_model.reward_manager)
    if called_with is None:
        return
    # Others that it does not take are told elsewhere.
    known = [name for name in settings.reward_kwargs if takes_keyword(function, name)]
    signature = parameters_of(function)
    try:
        signature.bind(**dict.fromkeys([*called_with, *known]))
    except TypeError as error:
        where = located(function, settings.name)
        yield (
            f"custom_reward_function.name={settings.name}: {where} takes {signature}; "
            f"reward_model.reward_manager={config.reward_model.reward_manager} calls it with "
            f"{', '.join(called_with)} by name: {error}"
        )


def _check_trajectory_function(config: PPOConfig, function: Callable[..., Any]) -> Iterator[str]:
    """Requires that a scoring function can be called with a trajectory and an environment."""
    settings = config.custom_reward_function
    parameters = inspect.signature(function).parameters.values()
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    ]
    left_open = set(needed) - settings.reward_kwargs.keys()
    if len(left_open) > MOST_ARGUMENTS_WITH_ENVIRONMENT:
        yield (
            f"custom_reward_function.name={settings.name}: {located(function, settings.name)} "
            f"takes ({', '.join(needed)}); with an "
            "environment it is called as reward_fn(trajectory) or reward_fn(trajectory, "
            "environment)"
        )
