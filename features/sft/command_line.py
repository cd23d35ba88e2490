"""Reads `python main.py CONFIG.yaml --sft DATA [key=value …]`, and checks it before torch loads."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from features.sft.checks import file_problems, rank_problems
from features.sft.config import sft_config
from training.config.checks import check_config
from training.config.explain import explain_run
from training.config.loader import ConfigError, load_config
from training.modes import starters
from training.run.signals import EndingSignals

# What the supervisor starts again.
PROGRAM = Path(__file__).resolve().parents[2] / "main.py"


class _Parser(ArgumentParser):
    """Raises ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (see --help)"])


def sft_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Trains on the conversations that the command line names; returns the exit code.

    With supervisor.max_restarts a process of its own trains, and is started again where it fails.

    Raises:
        ConfigError: it cannot be done; says what to do.
    """
    parser = _Parser(prog="main.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--sft", action="append", nargs="?", default=[], metavar="DATA")
    options, words = parser.parse_known_args(list(argv))
    files = [file for file in options.sft if file and "=" not in file]
    # `--sft key=value` takes the files of sft.files.
    words += [word for word in options.sft if word and "=" in word]
    loaded = load_config(words, check=False)
    config = sft_config(loaded.config, files)
    if loaded.explain:
        print(explain_run(loaded), flush=True)
        return 0
    problems = [*file_problems(config), *rank_problems(config)] or check_config(
        config, ask_engine=False, own_data=True
    )
    if problems:
        raise ConfigError(problems)
    for starter in starters():
        code = starter(config, PROGRAM, list(argv))
        if code is not None:
            return code
    # Imports torch: late.
    from features.sft.command import train

    return train(config, signals)
