"""What `main.py` does in place of training: an option that names it, and the function that does it.

Features bring them (training/features.py). Invariant: no such function's module is imported before
it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.loading import load_object
from training.features import features, named
from training.run.signals import EndingSignals

# Takes the words of the command line, and the signals that end it; returns the exit code.
ModeFunction = Callable[[Sequence[str], EndingSignals], int]
# Takes the config, the program and its words; returns the exit code where it has run them.
Starter = Callable[[Any, Path, list[str]], int | None]

MODES = {
    "--eval": "features.evaluation.command:evaluate_command",
    "--chat": "features.chat.command:chat_command",
}


def modes() -> dict[str, str]:
    """Returns by its option what may be done in place of training, as "module:function"."""
    found = dict(MODES)
    for feature in features().values():
        found |= feature.modes
    return found


def chosen_mode(argv: Sequence[str]) -> str | None:
    """Returns the option of a mode that is among the words; None: training is meant."""
    options = [word.partition("=")[0] for word in argv]
    return next((option for option in modes() if option in options), None)


def run_mode(option: str, argv: Sequence[str], signals: EndingSignals) -> int:
    """Does what the option names; returns the exit code."""
    function: ModeFunction = load_object(modes()[option], option)
    return function(argv, signals)


def starters() -> Iterator[Starter]:
    """Yields what may start the run in processes of its own."""
    for name, place in named("starter"):
        yield load_object(place, f"feature {name}")
