"""Reads the words of `python main.py CONFIG.yaml --judge-credit CHECKPOINT`, and makes its config.

Invariant: nothing here imports torch; what the policy is given and how it is sampled and paid stay
as they are in training.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from features.branching.settings import BranchingSettings
from training.config import PPOConfig
from training.config.command_line import read_command_line
from training.config.leaves import build
from training.config.loader import ConfigError
from training.core_algos.built_in import ESTIMATOR_NEEDS

# So begins the name under which all that the judged estimators read is asked for.
JUDGED = "judged_credit"
LEAST_GROUPS = 3


@dataclass(frozen=True)
class WantedCourt:
    """Holds what the command line asks for.

    Attributes:
        model: a checkpoint, a run, or a model.
        episodes: to judge on, at least. samples: continuations of each turn's state, an even
            number.
        estimators: their names.
        out: the folder of the results; None: RUN_DIR/credit/NAME.
        words: of the configuration.
    """

    model: str
    episodes: int
    samples: int
    estimators: tuple[str, ...]
    out: Path | None
    words: tuple[str, ...]
    is_found: bool = False


class _Parser(ArgumentParser):
    """Raises ConfigError where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} (see --help)"])


def read_words(argv: Sequence[str]) -> WantedCourt:
    """Sorts the command line's words into the options of a court and the configuration's.

    Without a CONFIG.yaml among them the one of the run counts.

    Raises:
        ConfigError: a number cannot be.
    """
    parser = _Parser(prog="main.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--judge-credit", required=True, metavar="CHECKPOINT")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--estimators", default="")
    parser.add_argument("--out", type=Path)
    options, words = parser.parse_known_args(list(argv))
    problems = []
    if options.samples < 2 or options.samples % 2:
        problems.append(
            f"--samples {options.samples}: the continuations of a state are divided into two "
            "halves; give an even number, 2 or more"
        )
    if options.episodes < 1:
        problems.append(f"--episodes {options.episodes}: give 1 or more")
    if problems:
        raise ConfigError(problems)
    found: list[str] = []
    command_line = read_command_line(words)
    if command_line.file is None and not command_line.file_problems:
        found = _config_of_the_run(options.judge_credit)
    names = dict.fromkeys(name.strip() for name in options.estimators.split(",") if name.strip())
    return WantedCourt(
        model=options.judge_credit,
        episodes=options.episodes,
        samples=options.samples,
        estimators=tuple(names),
        out=options.out,
        words=(*found, *words),
        is_found=bool(found),
    )


def _config_of_the_run(model: str) -> list[str]:
    """Returns the config.yaml of a run, or of a checkpoint's run, and words for its folder."""
    folder = Path(model).absolute()
    for place in (folder, folder.parent):
        if (place / "config.yaml").is_file():
            # Where its writer had it is no place to write to.
            return [str(place / "config.yaml"), f"trainer.default_local_dir={place}"]
    return []


def with_estimators(config: PPOConfig, wanted: WantedCourt) -> WantedCourt:
    """Returns what is wanted, with the estimators that are judged where none was named.

    They are the config's own and those beside it that need no further model.
    """
    if wanted.estimators:
        return wanted
    names = dict.fromkeys((config.algorithm.adv_estimator, "grpo", "rloo", "turn_return", "gigpo"))
    if not config.need_critic:
        names = {name: None for name in names if "values" not in ESTIMATOR_NEEDS.get(name, ())}
    return replace(wanted, estimators=tuple(names))


def name_that_needs(needs: Sequence[str]) -> str:
    """Names the estimator that stands for all that are judged, by what they read."""
    return "_".join((JUDGED, *needs))


def judging_config(
    config: PPOConfig,
    wanted: WantedCourt,
    out: Path,
    checkpoint: Path | None,
    needs: Sequence[str],
) -> PPOConfig:
    """Returns the configuration that plays and continues episodes with frozen weights.

    Args:
        checkpoint: whose weights they are; None: those of the config's model.
        needs: all that the judged estimators read.
    """
    branching = config.section(BranchingSettings)
    own = branching.samples if "branch_returns" in needs else 0
    values: dict[str, Any] = {
        "branching.at": ("every",),
        "branching.samples": wanted.samples + own,
        "branching.random_numbers": "fresh",
        "branching.first_turn": True,
        # What is cut short is worth something else.
        "branching.max_tokens": None,
        "algorithm.adv_estimator": name_that_needs(needs),
        "algorithm.filter_groups.enable": False,
        "trainer.default_local_dir": str(out),
        "trainer.resume_mode": "disable" if checkpoint is None else "resume_path",
        "trainer.resume_from_path": None if checkpoint is None else str(checkpoint),
        "trainer.resume_with_changes": checkpoint is not None,
        "trainer.rollout_n_gpus": 0,
        "trainer.async_level": 0,
        "trainer.train_finished_groups": False,
        "trainer.logger": (),
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.val_only": False,
        "trainer.critic_warmup": 0,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
        "records.folder": str(out / "episodes"),
        "alarms.mode": "off",
        "supervisor.max_restarts": 0,
    }
    return build(config, values)
