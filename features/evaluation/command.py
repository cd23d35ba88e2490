"""Evaluates from the command line: `python main.py CONFIG.yaml --eval MODEL [--against OTHER]`.

Invariant: results are on disk before anything is said about them.
"""

from __future__ import annotations

import math
import re
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from data.watchdog import watching
from features.evaluation.config import evaluation_config, require_tasks, with_samples
from features.evaluation.evaluated_model import EvaluatedModel, find_model
from features.evaluation.evaluation import (
    PASS_REWARD,
    RESULT,
    Evaluation,
    evaluate_model,
    name_in,
    output_folder,
    require_no_run,
    write_evaluation,
    write_json,
)
from features.evaluation.summary import (
    ALL,
    compare,
    describe,
    require_same_tasks,
    say_difference,
)
from training.config import PPOConfig
from training.config.checks import check_config
from training.config.command_line import read_command_line
from training.config.explain import PROJECT, explain_run
from training.config.layers import COMMAND_LINE
from training.config.leaves import Leaf, leaves
from training.config.loader import ConfigError, LoadedConfig, load_config
from training.run.leftovers import ends_leftovers
from training.run.signals import EndingSignals

# So much of a setting is shown that a stranger's config asks for.
MAX_VALUE_CHARS = 120
# Words that name data and weights, which are read as such, and the run.
HARMLESS = frozenset(
    {
        "data.train_files",
        "data.val_files",
        "data.prompt_key",
        "data.reward_fn_key",
        "actor_rollout_ref.model.path",
        "actor_rollout_ref.model.target_modules",
        "actor_rollout_ref.actor.optim.betas",
        "actor_rollout_ref.actor.checkpoint.save_contents",
        "actor_rollout_ref.actor.checkpoint.load_contents",
        "critic.model.path",
        "critic.optim.betas",
        "critic.checkpoint.save_contents",
        "critic.checkpoint.load_contents",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
    }
)
# Folders of this project whose code its user wrote, or keeps.
OWN_CODE = ("contrib", "custom", "data", "examples", "features", "training", "workers")
# A Python file, and what is taken from it.
CODE_FILES = {
    "custom_algorithm": None,
    "custom_reward_function.path": "custom_reward_function.name",
    "data.custom_cls.path": "data.custom_cls.name",
    "agent.environment.path": "agent.environment.cls",
}
# Names of what is registered here.
NAMES = (
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.rollout.name",
    "reward_model.reward_manager",
    "algorithm.adv_estimator",
)


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


def require_no_code(loaded: LoadedConfig, file: str) -> None:
    """Checks a config that a model's folder brought, which may be a stranger's.

    Numbers and the choices that a setting allows may stand there, the words of HARMLESS, and
    Python files of this project.

    Raises:
        ConfigError: another setting is in it, which could run code, or a program.
    """
    defaults = dict(leaves(PPOConfig()))
    own = _keys_of_own_code(dict(leaves(loaded.config)))
    asked = []
    for key, leaf in leaves(loaded.config):
        if key in own:
            continue
        source = loaded.sources.get(key)
        if source in ("default", COMMAND_LINE) or leaf.value == defaults[key].value:
            continue
        if key.endswith("trust_remote_code") or not _is_harmless(key, leaf.value):
            asked.append(f"{key}={leaf.value}"[:MAX_VALUE_CHARS])
    if asked:
        raise ConfigError(
            [
                f"{file} asks for {', '.join(asked)}, and nobody has named that file: if you trust "
                f"the one who wrote it, give it as the config: main.py {file} --eval …"
            ]
        )


def _keys_of_own_code(settings: Mapping[str, Leaf]) -> set[str]:
    """Returns the keys of Python files of this project, and of the names that are taken from them.

    Files of outputs are none of them: a stranger's run may lie there.
    """
    keys: set[str] = set()
    for key, name in CODE_FILES.items():
        path = settings[key].value
        if path is None or not any(
            Path(path).resolve().is_relative_to(PROJECT / folder) for folder in OWN_CODE
        ):
            continue
        keys.add(key)
        if name is not None and str(settings[name].value).isidentifier():
            keys.add(name)
    return keys


def _is_harmless(key: str, value: Any) -> bool:
    """Tells whether a setting of a stranger's may be taken."""
    if value is None or isinstance(value, bool | int | float) or key in HARMLESS:
        return True
    if key in NAMES:
        # A name with a dot or a colon is that of a file or a module.
        return re.fullmatch(r"[\w-]+", str(value)) is not None
    if isinstance(value, tuple | dict):
        return not value
    leaf = dict(leaves(PPOConfig()))[key]
    return isinstance(value, str) and leaf.plain is Literal


def evaluate_command(argv: Sequence[str], signals: EndingSignals) -> int:
    """Evaluates one model, or two on the same tasks; prints a table, returns the exit code.

    Raises:
        ConfigError, CannotUse, EnvironmentsFail: it cannot be done; says what to do.
    """
    wanted = read_words(argv)
    loaded = load_config(list(wanted.words), check=False)
    if wanted.is_found:
        require_no_code(loaded, wanted.words[0])
    config = with_samples(loaded.config, wanted.n, loaded.sources)
    if loaded.explain:
        print(explain_run(loaded), flush=True)
        return 0
    require_tasks(config)
    models = [find_model(given, config) for given in wanted.models]
    names = distinct_names(config, models)
    folders = output_folders(config, models, names, wanted.out)
    for model, folder in zip(models, folders, strict=True):
        require_no_run(folder)
        problems = check_config(evaluation_config(config, model, folder))
        if problems:
            raise ConfigError(problems)
    results = []
    played: list[Evaluation] = []
    for model, folder, name in zip(models, folders, names, strict=True):
        is_last = model is models[-1]
        evaluation = play(config, model, folder, models[0].step, signals if is_last else None)
        played.append(evaluation)
        results.append(write_evaluation(evaluation, folder, pass_reward=wanted.pass_reward))
        print(f"\n{describe(results[-1], name)}\n  {folder / RESULT}", flush=True)
    if len(models) == 2:
        _compare(played, results, names, folders[0].parent)
    if results_are_all_failures(results):
        print("every episode failed: these numbers tell nothing of the model", file=sys.stderr)
        return 1
    return 0


def play(
    config: PPOConfig,
    model: EvaluatedModel,
    folder: Path,
    step: int,
    signals: EndingSignals | None = None,
) -> Evaluation:
    """Evaluates a model under the watch that training has: what hangs or is left behind ends."""
    trainer = config.trainer
    name = "driver" if trainer.use_ray else "rank_0"
    with ends_leftovers(), watching(trainer.stall_timeout_s, folder / "stalls", name):
        return evaluate_model(config, model, folder, step=step, signals=signals)


def distinct_names(config: PPOConfig, models: Sequence[EvaluatedModel]) -> list[str]:
    """Names each model; two that have one name are told apart by the folder above, or a number."""
    names = [name_in(config, model) for model in models]
    if len(set(names)) == len(names):
        return names
    above = [Path(model.given).absolute().parent.name for model in models]
    longer = [f"{parent}_{name}" for parent, name in zip(above, names, strict=True)]
    if len(set(longer)) == len(longer):
        return longer
    return [f"{name}-{number}" for number, name in enumerate(names, start=1)]


def output_folders(
    config: PPOConfig, models: Sequence[EvaluatedModel], names: Sequence[str], out: Path | None
) -> list[Path]:
    """Returns each model's folder: OUT or RUN_DIR/eval/NAME; of two in eval/A-against-B."""
    if len(models) == 1:
        return [out.absolute() if out else output_folder(config, models[0])]
    both = (
        out.absolute() if out else output_folder(config, models[0]).parent / "-against-".join(names)
    )
    require_no_run(both)
    return [both / name for name in names]


def _compare(
    played: Sequence[Evaluation],
    results: Sequence[dict[str, Any]],
    names: Sequence[str],
    folder: Path,
) -> None:
    """Compares two evaluations, writes FOLDER/eval.json and says which model is better."""
    require_same_tasks(played[0].pairing(), played[1].pairing())
    differences = compare(results[0], results[1])
    sentences = {
        source: say_difference(entries, names[0], names[1])
        for source, entries in differences.items()
    }
    comparison = {
        "first": names[0],
        "second": names[1],
        "models": [asdict(evaluation.model.weights) for evaluation in played],
        "differences": differences,
        "sentences": sentences,
    }
    write_json(folder / RESULT, comparison)
    print()
    for source, sentence in sentences.items():
        alone = len(sentences) == 1 or source == ALL
        print(sentence if alone else f"{source}: {sentence}")
    print(f"  {folder / RESULT}", flush=True)


def results_are_all_failures(results: Sequence[dict[str, Any]]) -> bool:
    """Tells whether a model was evaluated none of whose episodes came to its end."""
    return any(result["failed_episodes"] == result["episodes"] for result in results)
