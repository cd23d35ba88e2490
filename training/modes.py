"""Lists what `main.py` does in place of training: an option that names it, and its function.

Features bring them (training/features.py). Invariant: no such function's module is imported before
it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.loading import load_object
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


def run_mode(option: str, argv: Sequence[str], signals: EndingSignals) -> int:
    """Does what the option names; returns the exit code."""
    function: ModeFunction = load_object(modes()[option], option)
    return function(argv, signals)


def starters() -> Iterator[Starter]:
    """Yields what may start the run in processes of its own."""
    for name, place in named("starter"):
        yield load_object(place, f"feature {name}")
