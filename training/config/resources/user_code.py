"""Loads users' own files, as the run will, and tells what stands in the way of using them."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from data.loading import is_users_file, load_extern_object, load_object
from data.names import did_you_mean
from data.texts import text_of
from training.config.resources.files import missing_file
from training.config.schema.optim import OptimConfig
from training.config.schema.ppo import PPOConfig


def load_custom_algorithm(path: str) -> None:
    """Runs the file that registers a user's estimators and losses; once per process."""
    # Any name will do: running the file is what registers.
    load_extern_object(path, "__name__")


def loading_failure(
    setting: str, load: Callable[..., Any], source: Any, *arguments: Any
) -> Iterator[str]:
    """Loads a user's code, and yields what it raised, with the line where the source is a file.

    Args:
        setting: KEY=VALUE that names the code.
        load: is called with the source, or sources, and the arguments.
    """
    try:
        load(source, *arguments)
    # Whatever such code does.
    except (Exception, SystemExit) as error:
        sources = [source] if isinstance(source, str) else list(source)
        files = [str(Path(re.sub(r":\w+$", "", str(s))).expanduser().resolve()) for s in sources]
        where = _place_of_fault(error, files)
        if isinstance(error, ValueError) and not where:
            # A sentence of the loader's own, which may name the setting itself.
            key = setting.partition("=")[0]
            text = text_of(error)
            yield text if text.startswith(key) else f"{setting}: {text}"
            return
        fix = "mend the file, or take it out"
        if "attempted relative import" in text_of(error):
            fix = "write `from NAME import …` without the dot: files beside this one are found"
        if isinstance(error, ModuleNotFoundError):
            fix = (
                "install it, or, where it is a file of yours, put that beside this one or start "
                "the run with PYTHONPATH=FOLDER, the folder that it is in"
            )
        yield f"{setting} cannot be loaded: {type(error).__name__}{where}: {text_of(error)}; {fix}"


def _place_of_fault(error: BaseException, files: list[str]) -> str:
    """Says in which line of a user's file something was raised; "" where none is on the way.

    Args:
        files: those that a setting names; another one, as a module beside them, is named.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename in files or is_users_file(frame.filename)]
    if not own:
        return ""
    if own[-1].filename in files:
        return f" in line {own[-1].lineno}"
    return f" in {own[-1].filename}, line {own[-1].lineno}"


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


def unusable_object(
    key: str,
    path: str,
    name_key: str,
    name: str | None,
    fits: Callable[[Any], bool] | None = None,
) -> list[str]:
    """Returns why a class or function cannot be taken from a user's file, if so.

    Args:
        key, path: the setting that names the file.
        name_key, name: the setting that names what is in it.
        fits: tells of what may be meant, where there is nothing of that name.
    """
    problems = []
    if name is None:
        problems.append(f"{name_key} is missing: which class of {path}?")
    file_problems = unusable_file(key, path)
    if file_problems or name is None:
        return problems + file_problems
    refusals = value_errors(load_extern_object, path, name, fits)
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


def check_observers(config: PPOConfig) -> Iterator[str]:
    """Requires that the user's observers can be loaded, and are classes."""
    key = "trainer.observers"
    for source in config.trainer.observers:
        place, _, name = source.rpartition(":")
        if not (place and name):
            yield f"{key} has {source!r}: write FILE.py:CLASS or PACKAGE.MODULE:CLASS"
            continue
        failures = list(loading_failure(f"{key}={source}", load_object, source, key))
        yield from failures
        if not failures and not isinstance(load_object(source, key), type):
            yield f"{key}={source} is no class: write `class {name}(Observer)`"


def check_optimizers(config: PPOConfig) -> Iterator[str]:
    """Requires of each optimiser, other than plain AdamW, that it can be made and steps."""
    for key in ("actor_rollout_ref.actor.optim", "critic.optim"):
        optim = attrgetter(key)(config)
        plain = OptimConfig()
        of_class = attrgetter("optimizer", "optimizer_impl")
        if of_class(optim) == of_class(plain) and not optim.override_optimizer_config:
            continue
        # It imports torch.
        from workers.model.optimizer import try_optimizer

        def attempt(source: str, optim: OptimConfig = optim) -> None:
            try_optimizer(optim)

        setting = f"{key}.optimizer={optim.optimizer}"
        for failure in loading_failure(setting, attempt, optim.optimizer):
            # A sentence about a setting names it in short.
            yield failure.replace(f"{setting}: optim.", f"{key}.")


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
