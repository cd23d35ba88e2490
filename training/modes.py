"""Lists what `main.py` does in place of training: an option that names it, and its function.

Features bring them (training/features.py). Invariant: no such function's module is imported before
it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.loading import load_object
from training.config.loader import ConfigError
from training.config.resources.models import missing_place
from training.features import features, folder_without, named
from training.run.signals import EndingSignals

# Takes the words of the command line, and the signals that end it; returns the exit code.
ModeFunction = Callable[[Sequence[str], EndingSignals], int]
# Takes the config, the program and its words; returns the exit code where it has run them.
Starter = Callable[[Any, Path, list[str]], int | None]


def modes() -> dict[str, str]:
    """Returns by its option what may be done in place of training, as "module:function"."""
    found: dict[str, str] = {}
    for feature in features().values():
        found |= feature.modes
    return found


def chosen_mode(argv: Sequence[str]) -> str | None:
    """Returns the option of a mode that is among the words; None: training is meant."""
    options = [word.partition("=")[0] for word in argv]
    return next((option for option in modes() if option in options), None)


def describe_missing_mode(argv: Sequence[str]) -> str | None:
    """Says which feature, whose folder is gone, brought an option among the words; None: none."""
    for word in argv:
        option = word.partition("=")[0]
        folder = folder_without("modes", option) if option.startswith("--") else None
        if folder is not None:
            return f"{option} is brought by {folder}, which is not here: put the folder back"
    return None


def require_models(argv: Sequence[str]) -> None:
    """Requires that the models, checkpoints and runs among the words are there.

    Raises:
        ConfigError: there is no such path, and it is in no form of a hub's name.
    """
    options = [option for feature in features().values() for option in feature.model_options]
    problems = []
    for place, word in enumerate(argv):
        option, has_value, value = word.partition("=")
        if option not in options:
            continue
        if not has_value:
            value = next(iter(argv[place + 1 :]), "")
        missing = missing_place(value) if value else None
        if missing is not None:
            problems.append(f"{option}: {missing}")
    if problems:
        raise ConfigError(problems)


def run_mode(option: str, argv: Sequence[str], signals: EndingSignals) -> int:
    """Does what the option names; returns the exit code.

    Raises:
        ConfigError: a path among the words is not there; and what the function raises.
    """
    require_models(argv)
    function: ModeFunction = load_object(modes()[option], option)
    return function(argv, signals)


def starters() -> Iterator[Starter]:
    """Yields what may start the run in processes of its own."""
    for name, place in named("starter"):
        yield load_object(place, f"feature {name}")
