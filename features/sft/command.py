"""Trains on conversations: what `--sft` does in place of a run (features/sft/command_line.py).

Invariant: the data is read, and found sound, before a model is loaded.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from data.plain_state import CannotSave
from data.watchdog import watching
from features.sft.data_files import BadData
from features.sft.reading import row_reader
from features.sft.settings import SFTSettings
from features.sft.trainer import SFTTrainer
from features.sft.turns import TrainedRow
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.observers import RunStopped
from training.run.checkpoint import CheckpointError
from training.run.checkpoint_folders import CannotResume
from training.run.exit_codes import MEND, OUT_OF_MEMORY
from training.run.leftovers import ends_leftovers
from training.run.model_source import CannotUse, local_model
from training.run.out_of_memory import ran_out_of_memory
from training.run.signals import EndingSignals
from workers.model.builder import ModelSpec, find_device

# The folder of the model, in that of the run.
MODEL = "model"


def read_all(config: PPOConfig, spec: ModelSpec) -> tuple[list[TrainedRow], list[TrainedRow]]:
    """Reads what is learnt, and what is held out.

    Raises:
        ConfigError: some of it cannot be learnt.
    """
    settings = config.section(SFTSettings)
    try:
        reader = row_reader(config, spec)
        rows = reader.read(settings.files)
        held_out: list[TrainedRow] = []
        if settings.val_files:
            held_out = reader.read(settings.val_files, "sft.val_files")
    except (BadData, ValueError, OSError) as error:
        raise ConfigError([str(error)]) from error
    if len(rows) < settings.batch_size:
        raise ConfigError(
            [
                f"sft.batch_size={settings.batch_size} is more than the {len(rows)} rows of "
                f"sft.files=[{', '.join(settings.files)}]: make it smaller, or give more rows"
            ]
        )
    return rows, held_out


def train(config: PPOConfig, signals: EndingSignals) -> int:
    """Trains, prints where the model lies, and returns the exit code.

    Raises:
        ConfigError: the data cannot be learnt.
    """
    trainer = config.trainer
    name = "driver" if trainer.use_ray else "rank_0"
    folder = Path(trainer.run_dir).absolute()
    with ends_leftovers(), watching(trainer.stall_timeout_s, folder / "stalls", name):
        model = config.actor_rollout_ref.model
        spec = ModelSpec(model, str(model.path), find_device("cpu"))
        rows, held_out = read_all(config, spec)
        made = SFTTrainer(config, spec.tokenizer, rows, held_out)
        made.signals = signals
        signals.postpone = lambda: made.in_step
        told = _fit(made, signals)
        if told is not None:
            print(told[0], file=sys.stderr)
            return told[1]
        for text in made.observers.summaries():
            print(text)
        _tell_model(made, rows)
    return 0


def _fit(trainer: SFTTrainer, signals: EndingSignals) -> tuple[BaseException, int] | None:
    """Trains and shuts the trainer down; returns what ended it early, and its exit code."""
    try:
        trainer.fit()
    except RunStopped as stop:
        return stop, stop.exit_code
    except (CannotResume, CannotSave) as error:
        return error, MEND
    except CheckpointError as error:
        return error, 1
    except Exception as error:
        # A rank's own error, as Ray hands it on, has its traceback for a text.
        cause = getattr(error, "cause", None) or error
        if not ran_out_of_memory(f"{type(cause).__name__}: {cause}"):
            raise
        budget = trainer.config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        told = (
            f"{' '.join(str(cause).split()):.300}. Memory ran out: lower "
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu ({budget}) or sft.max_length, "
            "or set model.enable_gradient_checkpointing=true"
        )
        return MemoryError(told), OUT_OF_MEMORY
    finally:
        signals.close()
        trainer.shutdown()
    return None


def _tell_model(trainer: SFTTrainer, rows: Sequence[TrainedRow]) -> None:
    """Writes the model as a run begins with it, in float32, and says where it is."""
    step = trainer.global_steps
    checkpoint = trainer.run_dir / f"global_step_{step}"
    print(f"learnt from {len(rows)} rows in {step} steps: {trainer.run_dir}")
    if not checkpoint.is_dir():
        print("no checkpoint of the last step was written (trainer.save_freq), and so no model")
        return
    folder = trainer.run_dir / MODEL
    try:
        write_model(checkpoint, folder)
    except CannotUse as error:
        print(error)
        return
    print(f"train on from it: actor_rollout_ref.model.path={folder}")


def write_model(checkpoint: Path, folder: Path) -> None:
    """Writes a checkpoint's model as a Hugging Face folder, in place of one that is there.

    Raises:
        CannotUse: the feature that writes models is not here.
    """
    temporary = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    with local_model(str(checkpoint), "float32") as written:
        shutil.copytree(written.path, temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
