"""Makes of the model that is to be evaluated what an evaluation needs: settings, form of weights.

What can be named stands in `named_model.py`. An evaluation reads weights where they lie, on each
rank, and copies none: `model_source.py`, for --chat, writes a folder instead. Invariant: nothing is
written where a model is looked for, so that a run which is under way may be evaluated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from features.evaluation.evaluated_weights import EvaluatedWeights, Form
from training.config import ModelConfig, PPOConfig
from training.config.plain_files import read_plain_text
from training.run.checkpoint_contents import ACTOR, load_driver_state
from training.run.checkpoint_weights import read_metadata
from training.run.named_model import (
    HUGGINGFACE,
    WEIGHTS,
    CannotUse,
    find_named_model,
    holds_weights,
)
from training.run.recorded_config import settings_of_step

# Taken from a run's record: what adapters are and stand on.
RECORDED = ("path", "lora_rank", "lora_alpha", "target_modules")


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
        CannotUse: there is no model, or not a whole one; says what is there.
    """
    named = find_named_model(given)
    settings = config.actor_rollout_ref.model
    if named.kind == "checkpoint":
        return _checkpoint(given, Path(named.path), settings)
    if named.kind == "peft":
        return _peft_folder(given, Path(named.path), settings)
    name = given.replace("/", "_") if named.kind == "hub" else _folder_name(Path(named.path))
    weights = EvaluatedWeights("folder", named.path)
    return EvaluatedModel(given, name, _of_folder(settings, named.path), weights)


def _of_folder(settings: ModelConfig, path: str) -> ModelConfig:
    """Returns the settings of a model without adapters."""
    return replace(settings, path=path, lora_rank=0)


def _peft_folder(given: str, path: Path, settings: ModelConfig) -> EvaluatedModel:
    """Takes adapters as peft saves them, and the base that they name, or else the config's."""
    try:
        entries = json.loads(read_plain_text(path / "adapter_config.json"))
    except (ValueError, OSError, RecursionError) as error:
        raise CannotUse(f"{path}/adapter_config.json cannot be read: {error}") from error
    if not any(path.glob("adapter_model.*")):
        raise CannotUse(f"{given} holds no weights (adapter_model.safetensors)")
    base = entries.get("base_model_name_or_path") or settings.path
    _require_own_base(settings, base, given)
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
        if holds_weights(exported):
            return found
        raise CannotUse(
            f"{given} holds no weights of the policy: it was saved without 'model' and 'hf_model' "
            "(actor_rollout_ref.actor.checkpoint.save_contents)"
        )
    names = read_metadata(path / WEIGHTS)
    form: Form = "adapters" if any(".lora_A." in name for name in names) else "checkpoint"
    has_values = any(name.startswith("value_head.") for name in names)
    weights = EvaluatedWeights(form, str(path / WEIGHTS), has_values)
    if form == "adapters" or not (exported / "config.json").exists():
        return replace(found, settings=_recorded(path, step, settings, given), weights=weights)
    return replace(found, weights=weights)


def _recorded(checkpoint: Path, step: int, settings: ModelConfig, given: str) -> ModelConfig:
    """Returns the model's settings that a run recorded; where it has not, the evaluation's."""
    recorded = settings_of_step(checkpoint.parent, step)
    if recorded is not None:
        return _with_recorded(settings, recorded, given)
    if settings.lora_rank == 0:
        raise CannotUse(
            f"{given} holds LoRA adapters alone, and {checkpoint.parent} no config.yaml that names "
            "their base: set actor_rollout_ref.model.path, lora_rank and lora_alpha as they were"
        )
    return settings


def _with_recorded(settings: ModelConfig, recorded: dict[str, Any], given: str) -> ModelConfig:
    """Takes from a run's record what its adapters are and stand on, and nothing that runs code."""
    try:
        section = dict(recorded["actor_rollout_ref"]["model"])
        taken = {name: section[name] for name in RECORDED}
        taken["target_modules"] = tuple(taken["target_modules"])
        overrides = dict(section["override_config"])
    except (KeyError, TypeError, ValueError) as error:
        raise CannotUse(f"{given}: its run's config.yaml is no run's ({error})") from error
    words = {name for name, value in overrides.items() if not isinstance(value, int | float)}
    unasked = [
        name for name in sorted(words) if settings.override_config.get(name) != overrides[name]
    ]
    if unasked:
        raise CannotUse(
            f"{given}: its run set actor_rollout_ref.model.override_config.{unasked[0]} to "
            f"{overrides[unasked[0]]!r}, which a folder may not ask for: set it here if you want it"
        )
    _require_own_base(settings, taken["path"], given)
    return replace(settings, **taken, override_config=overrides)


def _require_own_base(settings: ModelConfig, base: Any, given: str) -> None:
    """Raises CannotUse where code of a model would run that the folder names, and nobody else."""
    if settings.trust_remote_code and str(base) != str(settings.path):
        raise CannotUse(
            f"{given} stands on {base}, whose code trust_remote_code=true would run, and this "
            f"command trusts {settings.path}: set actor_rollout_ref.model.path={base} if you trust "
            "that, too"
        )
