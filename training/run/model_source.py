"""Finds the model that a command is given: a Hugging Face folder, a checkpoint, a run's latest.

    MODEL                             a folder with config.json, or the hub's org/name
    RUN_DIR/global_step_N             a checkpoint, of any number of ranks, with adapters or not
    RUN_DIR/global_step_N/actor       the same
    RUN_DIR                           its latest checkpoint

Invariant: nothing is changed where the model lies, so that a run that goes on there is not
disturbed; what is half-written, damaged or not ours is refused in a sentence.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from training.run.checkpoint_contents import ACTOR, LATEST, MANIFEST
from training.run.checkpoint_folders import saved_steps
from training.run.checkpoint_manifest import damage
from training.run.checkpoint_names import TEMPORARY, folder_of_step, step_in
from training.run.checkpoint_weights import CannotUse
from training.run.exported_model import CheckpointModel, write_model
from training.run.recorded_config import settings_of_step

__all__ = [
    "CannotUse",
    "ModelFolder",
    "find_checkpoint_model",
    "is_hub_name",
    "local_model",
    "tokenizer_folder",
]

logger = logging.getLogger(__name__)

# What a hub's name looks like.
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# A Hugging Face folder's weights.
WEIGHTS = ("*.safetensors", "*.bin")
# The weights in a checkpoint of verl's.
VERLS_FILES = "model_world_size_*_rank_*.pt"


@dataclass(frozen=True)
class ModelFolder:
    """Names a Hugging Face folder that engines and workers load.

    Attributes:
        path: the folder, or a hub's name.
        step: of the checkpoint that it is of; None where it was a Hugging Face folder already.
        checkpoint: that checkpoint's folder.
    """

    path: str
    step: int | None = None
    checkpoint: Path | None = None

    @property
    def overrides(self) -> list[str]:
        """Lists the settings that make a run take this model as it is.

        Adapters are in its weights already.
        """
        model = "actor_rollout_ref.model"
        return [
            f"{model}.path={self.path}",
            f"{model}.lora_rank=0",
            "actor_rollout_ref.rollout.lora_as_adapter=false",
        ]


@contextmanager
def local_model(place: str, dtype: str = "float32") -> Iterator[ModelFolder]:
    """Gives what `place` names as a Hugging Face folder, for as long as the block runs.

    A checkpoint is exported to a temporary folder (TMPDIR says where). In the type that the engine
    has its weights in (`rollout.dtype`) they are bitwise those that it had in training; in float32
    they are those that were trained.

    Args:
        place: see above.
        dtype: of an exported checkpoint's weights.
    Raises:
        CannotUse: it names no model that can be used; says why.
    """
    path = Path(place).expanduser()
    if is_hub_name(place) or _holds_model(path):
        yield ModelFolder(str(path))
        return
    model = find_checkpoint_model(path)
    with TemporaryDirectory(prefix="ppo_core_model_") as folder:
        logger.info("%s: writing its weights to %s", model.checkpoint, folder)
        write_model(model, Path(folder), dtype)
        yield ModelFolder(folder, step_of_checkpoint(model.checkpoint), model.checkpoint)


def tokenizer_folder(place: str) -> str:
    """Returns the folder, or hub's name, of the tokenizer of what `place` names; no weights.

    Raises:
        CannotUse: it names no model that can be used; says why.
    """
    path = Path(place).expanduser()
    if is_hub_name(place) or (path / "config.json").is_file():
        return str(path)
    return str(find_checkpoint_model(path).huggingface)


def is_hub_name(place: str) -> bool:
    """Checks whether a place can only be a model of the hub."""
    return not Path(place).exists() and HUB_NAME.fullmatch(place) is not None


def _holds_model(folder: Path) -> bool:
    """Checks whether a folder has a configuration and weights."""
    if not (folder / "config.json").is_file():
        return False
    return any(path for ending in WEIGHTS for path in folder.glob(ending))


def find_checkpoint_model(place: Path, base: str | None = None) -> CheckpointModel:
    """Finds the checkpoint that a path names, checks its files, and reads the run's settings.

    Args:
        base: takes the place of the base model that the settings name.
    Raises:
        CannotUse: there is none, or it is half-written, damaged or not ours.
    """
    checkpoint = _checkpoint_at(place)
    if not (checkpoint / ACTOR).is_dir():
        raise CannotUse(f"{checkpoint} holds no {ACTOR} folder, which the policy is in")
    problem = damage(checkpoint, (ACTOR,), read=(f"{ACTOR}/model/", f"{ACTOR}/huggingface/"))
    if problem is not None:
        raise CannotUse(f"{checkpoint} is damaged: {problem}")
    step = step_of_checkpoint(checkpoint)
    return CheckpointModel(checkpoint, settings_of_step(checkpoint.parent, step), base)


def step_of_checkpoint(checkpoint: Path) -> int | None:
    """Returns the step in a checkpoint's name; None where it was saved under another."""
    return step_in(checkpoint.name.removeprefix("global_step_"))


def _checkpoint_at(place: Path) -> Path:
    """Returns the checkpoint's folder that a path stands for, which has a manifest."""
    # Without following links: a checkpoint may be one.
    place = place.expanduser().absolute()
    if not place.is_dir():
        raise CannotUse(
            f"{place} is no folder; give a Hugging Face folder, a run's folder or its global_step_N"
        )
    if place.name.endswith(TEMPORARY):
        raise CannotUse(f"{place} is half-written; give a global_step_N folder")
    for folder in (place, place.parent, place.parent.parent):
        # The folder itself, its actor, or actor/huggingface.
        if (folder / MANIFEST).is_file() and _is_policy_of(place, folder):
            return folder
    steps = saved_steps(place)
    if not steps:
        raise CannotUse(f"{place} {_what_it_is(place)}")
    checkpoint = folder_of_step(place, _latest_step(place, steps))
    if not (checkpoint / MANIFEST).is_file():
        raise CannotUse(f"{checkpoint} {_what_it_is(checkpoint)}")
    return checkpoint


def _is_policy_of(place: Path, checkpoint: Path) -> bool:
    """Checks whether a path is a checkpoint, or the policy's folder in it."""
    inner = place.relative_to(checkpoint).parts
    if inner[:1] == ("critic",):
        raise CannotUse(f"{place} is the critic, which generates nothing; give {checkpoint}")
    return inner in ((), (ACTOR,), (ACTOR, "huggingface"), (ACTOR, "model"))


def _what_it_is(folder: Path) -> str:
    """Says what a folder is that is no checkpoint, as a predicate."""
    if any(folder.glob(VERLS_FILES)) or any(folder.glob(f"*/{VERLS_FILES}")):
        return "is a checkpoint of verl's, whose files are pickles: verl's model_merger converts it"
    if (folder / "adapter_config.json").is_file():
        return "is a peft folder: merge it into its base model, or give the checkpoint it came from"
    if (folder / "config.json").is_file():
        if _holds_model(folder):
            return "is a Hugging Face folder already"
        return "holds a config.json and no weights"
    if re.fullmatch(r"global_step_\d+", folder.name):
        return f"has no {MANIFEST}: it was not written to its end"
    return "holds neither a model (config.json) nor checkpoints (global_step_N)"


def _latest_step(run_dir: Path, steps: list[int]) -> int:
    """Returns the step that was saved last, of those that are there.

    Raises:
        CannotUse: the run's folder names one that is not there.
    """
    file = run_dir / LATEST
    latest = step_in(file.read_text(errors="replace")) if file.is_file() else None
    if latest is None:
        return steps[-1]
    if latest not in steps:
        there = ", ".join(str(step) for step in steps[-5:])
        raise CannotUse(
            f"{file} names step {latest}, which is not there; give one of {run_dir}/global_step_N: "
            f"{there}"
        )
    return latest
