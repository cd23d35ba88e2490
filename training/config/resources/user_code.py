"""Checks users' own code, and the names that are looked up among what it registers.

A user's file is run, as the run will, and what stands in the way of taking a class or function from
it is a problem.
"""

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.loading import load_extern_object
from data.texts import did_you_mean
from training.config.estimator_needs import (
    ESTIMATOR_NEEDS,
    LOSSES_SUMMED_OVER_TOKENS,
    estimator_needs,
)
from training.config.resources.files import missing_file
from training.config.schema.algorithm import RolloutCorrectionConfig
from training.config.schema.ppo import PPOConfig

# What the trainer gives a reward manager; everything else comes from reward_kwargs.
GIVEN_TO_MANAGERS = ("tokenizer", "num_examine", "compute_score", "reward_fn_key")
# Reward managers that are there and ask nothing of a config, which is known without importing them.
MANAGERS_WITHOUT_NEEDS = ("naive", "dapo", "prime")
# A reward function of a trajectory takes it, and the environment where it wants that.
ARGUMENTS_OF_TRAJECTORY_FUNCTION = 2


def load_custom_algorithm(path: str) -> None:
    """Runs the file that registers a user's estimators and losses; once per process."""
    # Any name will do: running the file is what registers.
    load_extern_object(path, "__name__")


# Loading.


def loading_failure(
    setting: str, load: Callable[..., Any], source: Any, *arguments: Any
) -> Iterator[str]:
    """Loads a user's code, and yields what it raised, with the line where the source is a file.

    Args:
        setting: KEY=VALUE that names the code.
        load: is called with the source and the arguments.
    """
    try:
        load(source, *arguments)
    # Whatever such code does.
    except (Exception, SystemExit) as error:
        file = str(Path(re.sub(r":\w+$", "", str(source))).expanduser().resolve())
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f" in line {lines[-1]}" if lines else ""
        yield (
            f"{setting} cannot be loaded: {type(error).__name__}{where}: {error}; mend the file, "
            "or take it out"
        )


def value_errors(call: Callable[..., Any], *arguments: Any) -> list[str]:
    """Makes a call and returns why its arguments are refused (ValueError), if they are."""
    try:
        call(*arguments)
    except ValueError as error:
        return [str(error)]
    return []


def unusable_file(key: str, path: str) -> list[str]:
    """Returns why a user's file is not there or does not run, if so."""
    missing = list(missing_file(key, path))
    return missing or list(loading_failure(f"{key}={path}", load_custom_algorithm, path))


def unusable_object(key: str, path: str, name_key: str, name: str | None) -> list[str]:
    """Returns why a class or function cannot be taken from a user's file, if so.

    Args:
        key, path: the setting that names the file.
        name_key, name: the setting that names what is in it.
    """
    problems = []
    if name is None:
        problems.append(f"{name_key} is missing: which class of {path}?")
    file_problems = unusable_file(key, path)
    if file_problems or name is None:
        return problems + file_problems
    refusals = value_errors(load_extern_object, path, name)
    if refusals:
        return [f"{name_key}={name}: {refusal}" for refusal in refusals]
    loaded = load_extern_object(path, name)
    if not callable(loaded):
        return [
            f"{name_key}={name}: in {path} it is a {type(loaded).__name__}; it must be a function "
            "or a class"
        ]
    return []


def check_classes(config: PPOConfig) -> Iterator[str]:
    """Requires that the user's dataset, sampler, agent and suite can be had from their files."""
    for start in ("data.custom_cls.", "data.sampler.class_", "agent.suite.", "agent.cls."):
        path_key = f"{start}path"
        name_key = f"{start}name"
        path, name = attrgetter(path_key, name_key)(config)
        if path is not None:
            yield from unusable_object(path_key, path, name_key, name)
        elif name is not None and start.startswith("agent."):
            yield f"{path_key} and {name_key} go together: the file, and the class in it"


# Estimator, loss and rollout correction.


def check_algorithm(config: PPOConfig) -> Iterator[str]:
    """Requires that loss, estimator and rollout correction exist, the user's own among them."""
    correction = config.with_correction.algorithm.rollout_correction
    yield from _check_correction(correction)
    if config.custom_algorithm:
        problems = unusable_file("custom_algorithm", config.custom_algorithm)
        yield from problems
        # What the file would have registered is not known.
        if problems:
            return
    yield from _check_loss(config, correction)
    yield from _check_estimator(config.algorithm.adv_estimator)
    task = config.algorithm.distillation_task
    if task is not None:
        yield from _check_estimator(task)
        if set(estimator_needs(task)) - {"index"}:
            yield (
                f"algorithm.distillation_task={task} must be an estimator that compares a "
                "group's scores, as grpo"
            )


def _check_correction(correction: RolloutCorrectionConfig) -> Iterator[str]:
    """Requires thresholds that can be read, by correcting a batch of one token."""
    if correction == RolloutCorrectionConfig():
        return
    # Imports torch: late.
    import torch

    from training.core_algos.policy_losses import correct_as

    log_probs = torch.zeros(1, 1)
    mask = torch.ones(1, 1)
    for problem in value_errors(correct_as, correction, log_probs, log_probs, mask):
        yield f"algorithm.rollout_correction.{problem}"


def _check_loss(config: PPOConfig, correction: RolloutCorrectionConfig) -> Iterator[str]:
    """Requires that the loss exists, and takes importance weights where there are some."""
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    # These exist and take weights, which is known without importing torch.
    if mode in LOSSES_SUMMED_OVER_TOKENS:
        return
    from training.core_algos import get_policy_loss_fn, taken

    refusals = value_errors(get_policy_loss_fn, mode)
    yield from refusals
    if refusals or not correction.rollout_is:
        return
    if not taken(get_policy_loss_fn(mode), {"rollout_is_weights": None}):
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={mode} takes no rollout_is_weights, "
            f"which algorithm.rollout_correction.rollout_is={correction.rollout_is} makes (the "
            "default where trainer.async_level is above 0): give the function that argument, by "
            "which each token's loss is to be multiplied, or set rollout_is=off"
        )


def _check_estimator(name: str) -> Iterator[str]:
    """Requires that an estimator exists; those in the table do, which needs no torch."""
    if name in ESTIMATOR_NEEDS:
        return
    from training.core_algos import get_adv_estimator_fn

    yield from value_errors(get_adv_estimator_fn, name)


# Reward function and reward manager.


def check_reward(config: PPOConfig) -> Iterator[str]:
    """Requires that the scoring function loads, and that the manager finds what it needs.

    The function's file may register the manager, and a manager may hand its reward_kwargs on to
    the function.
    """
    settings = config.custom_reward_function
    problems = []
    if settings.path is not None:
        problems += unusable_object(
            "custom_reward_function.path",
            settings.path,
            "custom_reward_function.name",
            settings.name,
        )
    problems += _manager_problems(config)
    yield from problems
    if not problems:
        yield from _check_reward_arguments(config)


def _manager_problems(config: PPOConfig) -> list[str]:
    """Returns why there is no such reward manager, or what its class says the config lacks."""
    name = config.reward_model.reward_manager
    if name in MANAGERS_WITHOUT_NEEDS:
        return []
    # Imports torch: late.
    from custom.reward_manager import get_reward_manager_cls

    refusals = value_errors(get_reward_manager_cls, name)
    if refusals:
        return refusals
    check = getattr(get_reward_manager_cls(name), "check_config", None)
    return list(check(config)) if callable(check) else []


def _check_reward_arguments(config: PPOConfig) -> Iterator[str]:
    """Requires that the scoring function and the manager take their reward_kwargs."""
    from custom.reward_score import default_compute_score

    settings = config.custom_reward_function
    function: Callable[..., Any] = default_compute_score
    function_name = "default_compute_score"
    if settings.path is not None:
        function = load_extern_object(settings.path, settings.name)
        function_name = settings.name
    parameters = list(inspect.signature(function).parameters.values())
    if settings.path is not None:
        if config.environments:
            yield from _check_trajectory_function(config, parameters)
        yield from unknown_arguments(
            "custom_reward_function.reward_kwargs",
            function_name,
            parameters,
            settings.reward_kwargs,
        )
    if config.reward_model.reward_kwargs:
        yield from _check_manager_arguments(config, function_name, parameters)


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
        if parameter.name not in GIVEN_TO_MANAGERS
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


def _check_trajectory_function(
    config: PPOConfig, parameters: Sequence[inspect.Parameter]
) -> Iterator[str]:
    """Requires that a scoring function can be called with a trajectory and an environment."""
    settings = config.custom_reward_function
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
        and parameter.default is parameter.empty
    ]
    left_open = set(needed) - settings.reward_kwargs.keys()
    if len(left_open) > ARGUMENTS_OF_TRAJECTORY_FUNCTION:
        yield (
            f"custom_reward_function.name={settings.name} takes ({', '.join(needed)}); with an "
            "environment it is called as reward_fn(trajectory) or reward_fn(trajectory, "
            "environment)"
        )


def unknown_arguments(
    key: str,
    taker_name: str,
    parameters: Sequence[inspect.Parameter],
    argument_names: Iterable[str],
) -> Iterator[str]:
    """Yields which arguments, passed by name, a function with these parameters does not take."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    takes = [parameter.name for parameter in parameters if parameter.kind in by_name]
    for name in argument_names:
        if name not in takes:
            yield (
                f"{key}.{name}: there is no such argument; {taker_name} takes "
                f"{', '.join(takes) or 'none'}.{did_you_mean(str(name), takes)}"
            )
