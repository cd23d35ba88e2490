"""Reads the words of `python main.py CONFIG.yaml --eval MODEL [--against OTHER]`.

Invariant: nothing here imports torch, so that what is wrong with the words is told at once.
"""

from __future__ import annotations

import math
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from features.evaluation.config import PASS_REWARD, require_tasks, with_samples
from training.config.command_line import read_command_line
from training.config.explain import explain_run
from training.config.found_config import require_no_code
from training.config.loader import ConfigError, load_config
from training.run.files import from_here
from training.run.signals import EndingSignals


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


def evaluate_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Evaluates one model, or two on the same tasks; prints a table, returns the exit code.

    Raises:
        ConfigError, CannotUse, EnvironmentsFail: it cannot be done; says what to do.
    """
    wanted = read_words(argv)
    loaded = load_config(list(wanted.words), check=False)
    if wanted.is_found:
        file = from_here(Path(wanted.words[0]))
        require_no_code(loaded, file, shlex.join(["python", "main.py", file, *argv]))
    config = with_samples(loaded.config, wanted.n, loaded.sources)
    if loaded.explain:
        print(explain_run(loaded), flush=True)
        return 0
    require_tasks(config)
    # Imports torch: late.
    from features.evaluation.command import evaluate

    return evaluate(config, wanted, signals)
