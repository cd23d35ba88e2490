"""Finds what a person names as a model, for --eval, --chat and the export, and says what it is.

    a folder with config.json and weights, or a name of the hub    a model
    a folder with adapter_config.json                              adapters, as peft saves them
    RUN_DIR/global_step_N, its actor, or a folder in that          a checkpoint
    RUN_DIR                                                        its latest sound checkpoint

Invariant: nothing is changed where a model is looked for, so that a run that goes on there is not
disturbed; what is half-written, damaged or not ours is refused in a sentence.
"""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.config.plain_files import read_plain_text, special_file
from training.config.resources.hub import hub_refusal
from training.config.resources.models import may_be_hub_name, missing_model, missing_place
from training.run.checkpoint_contents import ACTOR, CRITIC, DRIVER_STATE, LATEST, MANIFEST
from training.run.checkpoint_folders import saved_steps
from training.run.checkpoint_manifest import damage
from training.run.checkpoint_names import TEMPORARY, folder_of_step, step_in

logger = logging.getLogger(__name__)

Kind = Literal["hub", "folder", "peft", "checkpoint"]
# In a checkpoint: the policy's weights, and the folder of its config and tokenizer.
WEIGHTS = f"{ACTOR}/model"
HUGGINGFACE = f"{ACTOR}/huggingface"
# These files of a checkpoint are checked and read, by the beginnings of their names.
READ = (f"{WEIGHTS}/", f"{HUGGINGFACE}/", DRIVER_STATE)
# A Hugging Face folder's weights.
WEIGHT_FILES = ("*.safetensors", "*.bin")
# The weights in a checkpoint of verl's.
VERLS_FILES = "model_world_size_*_rank_*.pt"
OF_VERL = "is a checkpoint of verl's, whose files are pickles: verl's model_merger converts it"


class CannotUse(ValueError):
    """Reports that a place holds no model that can be used: what is there, and the fix."""


@dataclass(frozen=True)
class NamedModel:
    """Tells what a name stands for.

    Attributes:
        given: the name.
        kind: what is there.
        path: the folder, absolute: of kind `checkpoint` global_step_N; of kind `hub` the name.
        checkpoint: the one that it is, or that the folder lies in; only of kind `checkpoint` have
            its files been checked.
    """

    given: str
    kind: Kind
    path: str
    checkpoint: Path | None = None


def find_named_model(given: str, *, needs_weights: bool = True) -> NamedModel:
    """Finds what `given` names.

    Args:
        needs_weights: False: a Hugging Face folder may have its tokenizer alone.
    Raises:
        CannotUse: there is no model, or not a whole one; says what is there.
    """
    place = Path(given).expanduser()
    if not place.exists():
        missing = missing_place(given)
        if missing is not None:
            raise CannotUse(missing)
        refusal = hub_refusal(given)
        if refusal is not None:
            raise CannotUse(f"{given} {missing_model(given, refusal)}")
        return NamedModel(given, "hub", given)
    if place.is_file():
        raise CannotUse(f"{given} is a file; give the folder that it is in, {place.parent}")
    # Without following links: a checkpoint may be one.
    place = place.absolute()
    if place.name.endswith(TEMPORARY):
        raise CannotUse(
            f"{given} is half a checkpoint: it is being written, or its run was ended meanwhile; "
            f"name another of {place.parent}"
        )
    return _in_folder(given, place, needs_weights)


def _in_folder(given: str, place: Path, needs_weights: bool) -> NamedModel:
    """Tells what a folder is."""
    checkpoint = _checkpoint_around(place)
    special = special_file(checkpoint or place)
    if special is not None:
        raise CannotUse(
            f"{given}: {special} is no regular file, or too large for what it is: nobody saves a "
            "model so"
        )
    has_config = (place / "config.json").is_file()
    if has_config and (holds_weights(place) or not needs_weights):
        return NamedModel(given, "folder", str(place), checkpoint)
    if checkpoint is not None:
        require_sound(checkpoint)
        return NamedModel(given, "checkpoint", str(checkpoint), checkpoint)
    if (place / "adapter_config.json").is_file():
        return NamedModel(given, "peft", str(place))
    if has_config:
        raise CannotUse(f"{given} holds a config.json and no weights (*.safetensors)")
    if _is_verls(place):
        raise CannotUse(f"{given} {OF_VERL}")
    if not _is_run(place):
        raise CannotUse(
            f"{given} is no model: it holds neither a config.json (a Hugging Face folder), an "
            "adapter_config.json (peft), nor checkpoints (global_step_N)"
        )
    checkpoint = latest_checkpoint(place)
    return NamedModel(given, "checkpoint", str(checkpoint), checkpoint)


def is_hub_name(name: str) -> bool:
    """Checks whether a name can only be that of a model on the hub."""
    return not Path(name).exists() and may_be_hub_name(name)


def holds_weights(folder: Path) -> bool:
    """Checks whether a folder has weights as Hugging Face folders have them."""
    return any(path for ending in WEIGHT_FILES for path in folder.glob(ending))


def _is_verls(folder: Path) -> bool:
    return any(folder.glob(VERLS_FILES)) or any(folder.glob(f"*/{VERLS_FILES}"))


# Checkpoints


def _checkpoint_around(place: Path) -> Path | None:
    """Returns the checkpoint that a folder is, or is the policy's part of.

    Raises:
        CannotUse: the folder is the critic's.
    """
    for folder in (place, place.parent, place.parent.parent):
        if not _looks_like_checkpoint(folder):
            continue
        inner = place.relative_to(folder).parts
        if inner[:1] == (CRITIC,):
            raise CannotUse(f"{place} is the critic, which generates nothing; give {folder}")
        if inner in ((), (ACTOR,), tuple(WEIGHTS.split("/")), tuple(HUGGINGFACE.split("/"))):
            return folder
    return None


def _looks_like_checkpoint(folder: Path) -> bool:
    """Checks whether a folder is a checkpoint, or what is left of one."""
    if (folder / DRIVER_STATE).is_file() or (folder / MANIFEST).is_file():
        return (folder / ACTOR).is_dir() or (folder / DRIVER_STATE).is_file()
    is_named_so = re.fullmatch(r"global_step_\d+", folder.name) is not None
    return is_named_so and not (folder / "config.json").is_file()


def require_sound(checkpoint: Path) -> None:
    """Raises CannotUse where a checkpoint is not whole, or a file of the policy has changed."""
    problem = _problem_of(checkpoint)
    if problem is not None:
        raise CannotUse(f"{checkpoint} {problem}")


def _problem_of(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint, as a predicate; None where nothing is."""
    if not (checkpoint / MANIFEST).is_file():
        if _is_verls(checkpoint):
            return OF_VERL
        return f"is half a checkpoint: it has no {MANIFEST}, so it was not written to its end"
    if not (checkpoint / ACTOR).is_dir():
        return f"holds no {ACTOR} folder, which the policy is in"
    problem = damage(checkpoint, (ACTOR,), read=READ)
    return None if problem is None else f"is damaged: {problem}"


def _is_run(folder: Path) -> bool:
    files = (LATEST, "config.yaml", "metrics.jsonl")
    return any((folder / name).exists() for name in files) or any(folder.glob("global_step_*"))


def latest_checkpoint(run_dir: Path) -> Path:
    """Finds a run's latest sound checkpoint, as a run that resumes does, and changes nothing.

    Later steps than the run itself names are of an abandoned run.

    Raises:
        CannotUse: there is none, or the run names one that is not there.
    """
    steps = _steps_of_run(run_dir)
    problems = []
    for step in reversed(steps):
        checkpoint = folder_of_step(run_dir, step)
        problem = _problem_of(checkpoint)
        if problem is None:
            return checkpoint
        logger.error("%s %s: it is left out", checkpoint, problem)
        problems.append(f"{checkpoint.name} {problem}")
    if problems:
        raise CannotUse(f"{run_dir} has no sound checkpoint: {'; '.join(problems)}")
    if any(run_dir.glob(f"global_step_*{TEMPORARY}")):
        raise CannotUse(f"{run_dir}: its only checkpoint is not written to the end yet")
    raise CannotUse(f"{run_dir} holds no checkpoint yet")


def _steps_of_run(run_dir: Path) -> list[int]:
    """Lists the steps of a run's checkpoints up to the one that it saved last, ascending."""
    file = run_dir / LATEST
    steps = saved_steps(run_dir)
    latest = step_in(read_plain_text(file, errors="replace")) if file.is_file() else None
    if latest is None or not steps:
        return steps
    if latest not in steps:
        there = ", ".join(str(step) for step in steps[-5:])
        raise CannotUse(
            f"{file} names step {latest}, which is not there; give one of {run_dir}/global_step_N: "
            f"{there}"
        )
    return [step for step in steps if step <= latest]
