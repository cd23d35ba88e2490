"""Gives the model that a command is given as a Hugging Face folder, for --chat and the export.

What can be named stands in `named_model.py`; a checkpoint, of any number of ranks, with adapters or
not, is written by the feature that exports (`Feature.model_writer`). Invariant: nothing is changed
where the model lies.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from training.features import brought, folder_that_brings
from training.run.checkpoint_contents import ACTOR
from training.run.checkpoint_names import step_in
from training.run.named_model import (
    HUGGINGFACE,
    CannotUse,
    Kind,
    NamedModel,
    find_named_model,
    require_sound,
)
from training.run.out_of_memory import ran_out_of_memory
from training.run.recorded_config import settings_of_step

if TYPE_CHECKING:
    from training.run.checkpoint_weights import Adapters

logger = logging.getLogger(__name__)
# So much of a library's complaint about a model is shown.
MAX_REASON_CHARS = 300

# The text for a folder that is no checkpoint.
NOT_EXPORTED: dict[Kind, str] = {
    "hub": "is no folder; give a run's folder or its global_step_N",
    "folder": "is a Hugging Face folder already",
    "peft": "is a peft folder: merge it into its base model, or give the checkpoint it came from",
}


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


@dataclass(frozen=True)
class CheckpointModel:
    """Names the policy of a checkpoint, and what the run's settings say of it.

    Attributes:
        checkpoint: a `global_step_N` folder, whose files have been checked.
        settings: of the run, nested as in config.yaml; None where there is none beside.
        base: takes the place of the base model that the settings name.
    """

    checkpoint: Path
    settings: dict[str, Any] | None = None
    base: str | None = None

    @property
    def actor(self) -> Path:
        """Returns the policy's folder."""
        return self.checkpoint / ACTOR

    @property
    def huggingface(self) -> Path:
        """Returns the folder of its config and tokenizer."""
        return self.actor / "huggingface"

    @property
    def generation_dtype(self) -> str:
        """Returns the type that the model generated with in training, bfloat16 where none is known.

        Trained weights are float32; the engine had them in this type.
        """
        if self.settings is None:
            return "bfloat16"
        return str(self._setting("rollout", "dtype"))

    @property
    def base_model(self) -> str | None:
        """Returns the folder or name of the model that training began with, where it is known."""
        if self.base is not None or self.settings is None:
            return self.base
        return str(self._setting("model", "path"))

    def adapters(self) -> "Adapters":
        """Returns how the checkpoint's adapters count.

        Raises:
            CannotUse: the run's settings are not there.
        """
        # Imports torch: late.
        from training.run.checkpoint_weights import Adapters
        from workers.model.builder import torch_dtype

        if self.settings is None or self.base_model is None:
            raise CannotUse(
                f"{self.checkpoint} holds LoRA adapters alone; what they stand on and "
                f"lora_alpha are in the run's config.yaml, which is not in "
                f"{self.checkpoint.parent}: put it there"
            )
        return Adapters(
            alpha=int(self._setting("model", "lora_alpha")),
            base=self.base_model,
            dtype=torch_dtype(str(self._setting("model", "dtype"))),
        )

    def _setting(self, section: str, name: str) -> Any:
        """Returns a setting of `actor_rollout_ref`."""
        try:
            return (self.settings or {})["actor_rollout_ref"][section][name]
        except (KeyError, TypeError) as error:
            raise CannotUse(
                f"{self.checkpoint.parent}/config.yaml lacks actor_rollout_ref.{section}.{name}: "
                "it is no run's"
            ) from error


@contextmanager
def local_model(place: str, dtype: str = "float32") -> Iterator[ModelFolder]:
    """Gives what `place` names as a Hugging Face folder, for as long as the block runs.

    A checkpoint is exported to a temporary folder (TMPDIR says where). In the type that the engine
    has its weights in (`rollout.dtype`) they are bitwise those that it had in training; in float32
    they are those that were trained.

    Args:
        dtype: of an exported checkpoint's weights.
    Raises:
        CannotUse: it names no model that can be used; says why.
    """
    named = find_named_model(place)
    if named.kind in ("hub", "folder"):
        yield ModelFolder(named.path)
        return
    model = _checkpoint_model(named)
    with TemporaryDirectory(prefix="ppo_core_model_") as folder:
        logger.info("%s: writing its weights to %s", model.checkpoint, folder)
        _write_model(model, Path(folder), dtype)
        yield ModelFolder(folder, step_of_checkpoint(model.checkpoint), model.checkpoint)


@contextmanager
def reading_model(place: str) -> Iterator[None]:
    """Raises ValueError where a folder's files make no model, which shows itself in many ways.

    What memory does not hold stays as it is.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if ran_out_of_memory(text):
            raise
        raise ValueError(f"{place} cannot be read as a model: {text[:MAX_REASON_CHARS]}") from error


def _write_model(model: CheckpointModel, out: Path, dtype: str) -> None:
    """Writes a checkpoint's model into the folder `out`, by the feature that can.

    Raises:
        CannotUse: that feature is not here, or the checkpoint cannot be read.
    """
    writers = list(brought("model_writer"))
    if not writers:
        raise CannotUse(
            f"{model.checkpoint} is a checkpoint, which {folder_that_brings('model_writer')}, not "
            "here, would write as a Hugging Face folder: put the feature back"
        )
    writers[0](model, out, dtype)


def tokenizer_folder(place: str) -> str:
    """Returns the folder, or hub's name, of the tokenizer of what `place` names; no weights.

    Raises:
        CannotUse: it names no model that can be used; says why.
    """
    named = find_named_model(place, needs_weights=False)
    if named.kind == "checkpoint":
        return str(Path(named.path) / HUGGINGFACE)
    if named.kind == "peft":
        raise CannotUse(f"{place} {NOT_EXPORTED['peft']}")
    return named.path


def find_checkpoint_model(place: str | Path, base: str | None = None) -> CheckpointModel:
    """Finds the checkpoint that a path names, checks its files, and reads the run's settings.

    Args:
        base: takes the place of the base model that the settings name.
    Raises:
        CannotUse: there is none, or it is half-written, damaged or not ours.
    """
    return _checkpoint_model(find_named_model(str(place)), base)


def _checkpoint_model(named: NamedModel, base: str | None = None) -> CheckpointModel:
    """Reads the run's settings of a checkpoint, or of the one that a folder lies in."""
    checkpoint = named.checkpoint
    if checkpoint is None:
        raise CannotUse(f"{named.given} {NOT_EXPORTED[named.kind]}")
    if named.kind != "checkpoint":
        require_sound(checkpoint)
    step = step_of_checkpoint(checkpoint)
    return CheckpointModel(checkpoint, settings_of_step(checkpoint.parent, step), base)


def step_of_checkpoint(checkpoint: Path) -> int | None:
    """Returns the step in a checkpoint's name; None where it was saved under another."""
    return step_in(checkpoint.name.removeprefix("global_step_"))
