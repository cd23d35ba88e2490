"""Lists what `main.py` does in place of training: an option that names it, and its function.

Invariant: no such function's module is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from data.loading import load_object
from training.run.signals import EndingSignals

# Takes the words of the command line, and the signals that end it; returns the exit code.
ModeFunction = Callable[[Sequence[str], EndingSignals], int]

MODES = {
    "--eval": "training.evaluation_command:evaluate_command",
    "--chat": "training.chat.command:chat_command",
    "--serve": "training.serve:serve_command",
}


def chosen_mode(argv: Sequence[str]) -> str | None:
    """Returns the option of MODES that is among the words; None: training is meant."""
    options = [word.partition("=")[0] for word in argv]
    return next((option for option in MODES if option in options), None)


def run_mode(option: str, argv: Sequence[str], signals: EndingSignals) -> int:
    """Does what the option names; returns the exit code."""
    function: ModeFunction = load_object(MODES[option], option)
    return function(argv, signals)
