"""Evaluates what the command line asks for (features/evaluation/command_line.py).

Invariant: results are on disk before anything is said about them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data.watchdog import watching
from features.evaluation.config import evaluation_config
from features.evaluation.evaluated_model import EvaluatedModel, find_model
from features.evaluation.evaluation import (
    RESULT,
    Evaluation,
    evaluate_model,
    name_in,
    output_folder,
    require_no_run,
    set_result_aside,
    write_evaluation,
    write_json,
)
from features.evaluation.summary import (
    compare,
    describe,
    require_same_tasks,
    say_difference,
)
from features.evaluation.words import Wanted
from training.config import PPOConfig
from training.config.checks import check_config
from training.config.loader import ConfigError
from training.run.leftovers import ends_leftovers
from training.run.signals import EndingSignals


def evaluate(config: PPOConfig, wanted: Wanted, signals: EndingSignals) -> int:
    """Evaluates what is wanted, prints a table, returns the exit code.

    Raises:
        ConfigError, CannotUse, EnvironmentsFail: it cannot be done; says what to do.
    """
    models = [find_model(given, config) for given in wanted.models]
    names = distinct_names(config, models)
    folders = output_folders(config, models, names, wanted.out)
    if wanted.is_found and wanted.out is None:
        require_in_run(folders, Path(config.trainer.run_dir))
    for model, folder in zip(models, folders, strict=True):
        require_no_run(folder)
        problems = check_config(evaluation_config(config, model, folder))
        if problems:
            raise ConfigError(problems)
    if len(models) == 2:
        set_result_aside(folders[0].parent)
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


def require_in_run(folders: Sequence[Path], run_dir: Path) -> None:
    """Raises ConfigError where a link of a run, which may be a stranger's, leads out of it."""
    for folder in folders:
        if not folder.resolve().is_relative_to(run_dir.resolve()):
            raise ConfigError(
                [f"{folder} leads to {folder.resolve()}: name the folder that is meant with --out"]
            )


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
        # That of all sources, or of the only one, comes last.
        is_last = source == list(sentences)[-1]
        print(sentence if is_last else f"{source}: {sentence}")
    print(f"  {folder / RESULT}", flush=True)


def results_are_all_failures(results: Sequence[dict[str, Any]]) -> bool:
    """Tells whether a model was evaluated none of whose episodes came to its end."""
    return any(result["failed_episodes"] == result["episodes"] for result in results)
