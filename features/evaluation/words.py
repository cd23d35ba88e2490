"""Reads the words of `python main.py CONFIG.yaml --eval MODEL [--against OTHER]`."""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from features.evaluation.config import PASS_REWARD
from training.config.command_line import read_command_line
from training.config.loader import ConfigError


@dataclass(frozen=True)
class Wanted:
    """Holds what the command line asks for.

    Attributes:
        models: one, or two that are compared.
        n: samples of each task; None: as the config says.
        out: the folder of the results; None: RUN_DIR/eval/NAME.
        pass_reward: an episode passes from this reward on.
        words: of the configuration.
        is_found: its file is the one that lies in the model's folder, and nobody has named it.
    """

    models: tuple[str, ...]
    n: int | None
    out: Path | None
    pass_reward: float
    words: tuple[str, ...]
    is_found: bool = False


class _Parser(ArgumentParser):
    """Raises ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (see --help)"])


def read_words(argv: Sequence[str]) -> Wanted:
    """Sorts the command line's words into the options of an evaluation and the configuration's.

    Without a CONFIG.yaml among them the one of the run counts, whose model is evaluated.
    """
    parser = _Parser(prog="main.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--eval", required=True, metavar="MODEL_OR_CHECKPOINT")
    parser.add_argument("--against", metavar="MODEL_OR_CHECKPOINT")
    parser.add_argument("--n", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--pass-reward", type=float, default=PASS_REWARD)
    options, words = parser.parse_known_args(list(argv))
    if not math.isfinite(options.pass_reward):
        raise ConfigError([f"--pass-reward {options.pass_reward}: give a finite number"])
    models: tuple[str, ...] = (options.eval,)
    if options.against is not None:
        models = (options.eval, options.against)
    found: list[str] = []
    command_line = read_command_line(words)
    if command_line.file is None and not command_line.file_problems:
        found = _config_of_the_run(options.eval)
    return Wanted(
        models, options.n, options.out, options.pass_reward, (*found, *words), bool(found)
    )


def _config_of_the_run(model: str) -> list[str]:
    """Returns the config.yaml of a run, or of a checkpoint's run, and words for its folder."""
    folder = Path(model).absolute()
    for place in (folder, folder.parent):
        if (place / "config.yaml").is_file():
            # Where its writer had it is no place to write to.
            return [str(place / "config.yaml"), f"trainer.default_local_dir={place}"]
    return []
