"""Finds the model that is to be evaluated: what a person names, as folder and form of its weights.

    global_step_N, or RUN_DIR and its latest      a checkpoint, sharded or not, adapters too
    a Hugging Face folder, or a name on the hub   a model
    a peft folder                                 adapters, with the base that they name

Invariant: nothing is written where a model is looked for, so that a run which is under way may be
evaluated; what is not whole is refused.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from training.config import ModelConfig, PPOConfig
from training.config.resources.files import nearest_in_folder
from training.config.resources.models import HUB_NAME
from training.run.checkpoint_contents import (
    ACTOR,
    DRIVER_STATE,
    LATEST,
    MANIFEST,
    load_driver_state,
)
from training.run.checkpoint_folders import CannotResume, saved_steps
from training.run.checkpoint_manifest import damage
from training.run.checkpoint_names import TEMPORARY, folder_of_step, step_in
from workers.evaluated_weights import EvaluatedWeights, Form
from workers.model.checkpoint_reader import SafeReader

# What of a checkpoint is read, by the beginnings of its files' names.
WEIGHTS = f"{ACTOR}/model/"
HUGGINGFACE = f"{ACTOR}/huggingface/"
READ = (WEIGHTS, HUGGINGFACE, DRIVER_STATE)


@dataclass(frozen=True)
class EvaluatedModel:
    """Holds a model that was found.

    Attributes:
        given: what a person named.
        name: short, for folders and tables.
        settings: the model's section of the configuration, of which engine and tokenizer are built.
        weights: where they are.
        step: of the run that saved them; 0 of other models. Validation's sampling is seeded by it.
        run_dir: of that run.
    """

    given: str
    name: str
    settings: ModelConfig
    weights: EvaluatedWeights
    step: int = 0
    run_dir: Path | None = None


def find_model(given: str, config: PPOConfig) -> EvaluatedModel:
    """Finds what `given` names.

    Args:
        config: of the evaluation; what it says of models holds where the model does not tell.
    Raises:
        CannotResume: there is no model, or not a whole one; says what is there.
    """
    path = Path(given)
    settings = config.actor_rollout_ref.model
    if not path.exists():
        return _on_the_hub(given, settings)
    if path.is_file():
        raise CannotResume(f"{given} is a file; give the folder that it is in, {path.parent}")
    if path.name.endswith(TEMPORARY):
        raise CannotResume(
            f"{given} is half a checkpoint: it is being written, or its run was ended meanwhile; "
            f"name another of {path.absolute().parent}"
        )
    # Of a run's folder its parts, too.
    path = path.absolute()
    if path.name == ACTOR and (path.parent / DRIVER_STATE).exists():
        path = path.parent
    if (path / ACTOR).is_dir() or (path / DRIVER_STATE).exists():
        _require_whole(given, path)
        return _checkpoint(given, path, settings)
    if (path / "adapter_config.json").is_file():
        return _peft_folder(given, path, settings)
    if (path / "config.json").is_file():
        return _model_folder(given, path, settings)
    if _is_run(path):
        return _checkpoint(given, latest_checkpoint(path), settings)
    raise CannotResume(
        f"{given} is no model: it holds neither a config.json (a Hugging Face folder), an "
        "adapter_config.json (peft), nor checkpoints (global_step_N)"
    )


def _on_the_hub(given: str, settings: ModelConfig) -> EvaluatedModel:
    """Takes a name for one on the hub, which is asked for it with the other settings."""
    in_a_folder = "/" in given and Path(given).parent.is_dir()
    if in_a_folder or not HUB_NAME.fullmatch(given):
        raise CannotResume(
            f"there is no {given} (seen from {Path.cwd()}){nearest_in_folder(given)}"
        )
    weights = EvaluatedWeights("folder", given)
    return EvaluatedModel(given, given.replace("/", "_"), _of_folder(settings, given), weights)


def _of_folder(settings: ModelConfig, path: str) -> ModelConfig:
    """Returns the settings of a model without adapters."""
    return replace(settings, path=path, lora_rank=0)


def _model_folder(given: str, path: Path, settings: ModelConfig) -> EvaluatedModel:
    """Takes a Hugging Face folder; one of a checkpoint may lack the weights."""
    if not any((*path.glob("*.safetensors"), *path.glob("*.bin"))):
        advice = ""
        if path.parent.name == ACTOR:
            advice = f"; name its checkpoint, {path.parent.parent}"
        raise CannotResume(f"{given} holds no weights (*.safetensors){advice}")
    weights = EvaluatedWeights("folder", str(path))
    name = _folder_name(path)
    return EvaluatedModel(given, name, _of_folder(settings, str(path)), weights)


def _peft_folder(given: str, path: Path, settings: ModelConfig) -> EvaluatedModel:
    """Takes adapters as peft saves them, and the base that they name, or else the config's."""
    try:
        entries = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise CannotResume(f"{path}/adapter_config.json cannot be read: {error}") from error
    if not any(path.glob("adapter_model.*")):
        raise CannotResume(f"{given} holds no weights (adapter_model.safetensors)")
    base = entries.get("base_model_name_or_path") or settings.path
    weights = EvaluatedWeights("peft", str(path))
    name = _folder_name(path)
    return EvaluatedModel(given, name, _of_folder(settings, str(base)), weights)


def _folder_name(path: Path) -> str:
    """Names a model by its folder, and by its checkpoint where it is a part of one."""
    parts = path.parts[-1:]
    if path.parent.name == ACTOR:
        parts = (path.parts[-3], path.parts[-1])
    return "_".join(parts)


# Checkpoints


def _is_run(path: Path) -> bool:
    files = (LATEST, "config.yaml", "metrics.jsonl")
    return any((path / name).exists() for name in files) or any(path.glob("global_step_*"))


def latest_checkpoint(run_dir: Path) -> Path:
    """Finds a run's latest whole checkpoint, and changes nothing.

    Later steps than the run itself names are of an abandoned run.

    Raises:
        CannotResume: there is none.
    """
    steps = saved_steps(run_dir, (ACTOR,))
    file = run_dir / LATEST
    latest = step_in(file.read_text(errors="replace")) if file.exists() else None
    if latest in steps:
        steps = [step for step in steps if step <= latest]
    for step in reversed(steps):
        folder = folder_of_step(run_dir, step)
        if damage(folder, (ACTOR,), read=READ) is None:
            return folder
    begun = any(run_dir.glob(f"global_step_*{TEMPORARY}"))
    why = "it holds no checkpoint yet"
    if steps:
        why = f"its checkpoints ({', '.join(map(str, steps))}) are damaged"
    elif begun:
        why = "its only checkpoint is not written to the end yet"
    raise CannotResume(f"{run_dir} has nothing to evaluate: {why}")


def _require_whole(given: str, path: Path) -> None:
    if not (path / MANIFEST).exists():
        raise CannotResume(f"{given} is half a checkpoint: it has no {MANIFEST}, which comes last")
    problem = damage(path, (ACTOR,), read=READ)
    if problem is not None:
        raise CannotResume(f"{given} is damaged: {problem}")


def _checkpoint(given: str, path: Path, settings: ModelConfig) -> EvaluatedModel:
    """Takes a checkpoint: the weights that the trainer saved, or else its Hugging Face folder."""
    step = load_driver_state(path).global_steps
    run_dir = path.parent
    exported = path / HUGGINGFACE
    found = EvaluatedModel(
        given,
        path.name,
        _of_folder(settings, str(exported)),
        EvaluatedWeights("folder", str(exported)),
        step,
        run_dir,
    )
    if not (path / WEIGHTS / ".metadata").exists():
        if any(exported.glob("*.safetensors")):
            return found
        raise CannotResume(
            f"{given} holds no weights of the policy: it was saved without 'model' and 'hf_model' "
            "(actor_rollout_ref.actor.checkpoint.save_contents)"
        )
    names = _saved_names(path / WEIGHTS)
    form: Form = "adapters" if any(".lora_A." in name for name in names) else "checkpoint"
    has_values = any(name.startswith("value_head.") for name in names)
    weights = EvaluatedWeights(form, str(path / WEIGHTS), has_values)
    if form == "adapters" or not (exported / "config.json").exists():
        return replace(found, settings=_recorded(run_dir, settings, given), weights=weights)
    return replace(found, weights=weights)


def _saved_names(folder: Path) -> list[str]:
    try:
        return list(SafeReader(folder).read_metadata().state_dict_metadata)
    except (pickle.UnpicklingError, OSError, EOFError) as error:
        raise CannotResume(f"{folder} cannot be read: {error}") from error


def _recorded(run_dir: Path, settings: ModelConfig, given: str) -> ModelConfig:
    """Returns the model's settings that a run recorded; where it has not, the evaluation's."""
    file = run_dir / "config.yaml"
    if file.exists():
        recorded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        section = dict(recorded["actor_rollout_ref"]["model"])
        section["target_modules"] = tuple(section["target_modules"])
        return replace(settings, **section)
    if settings.lora_rank == 0:
        raise CannotResume(
            f"{given} holds LoRA adapters alone, and {run_dir} no config.yaml that names their "
            "base: set actor_rollout_ref.model.path, lora_rank and lora_alpha as they were"
        )
    return settings
