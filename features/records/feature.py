"""Records what a run plays and trains on: records.keep_gib.

What other features ask of records stands here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from features.records.settings import RecordsSettings
from training.features import Feature

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from data.protocol import DataProto
    from training.config import PPOConfig

MOVED = (
    "training.run.episode_recorder",
    "training.run.episode_entries",
    "training.run.episode_files",
    "training.run.record_shelf",
    "training.run.step_arrays",
    "training.run.background_writer",
    "training.run.token_fates",
    "workers.model.token_record",
    "workers.model.gradient_shares",
    "workers.rollout.episode_records",
    "workers.rollout.row_records",
    "workers.rollout.token_origins",
)
FEATURE = Feature(
    section=RecordsSettings,
    moved_keys={
        "agent.episodes_keep": "records.keep_gib",
        "agent.episodes_dir": "records.folder",
        "agent.record_gradients": "records.gradients",
    },
    moved_modules={old: f"features.records.{old.rpartition('.')[2]}" for old in MOVED},
    checks="features.records.checks:problems",
    observer="features.records.episode_recorder:open_recorder",
    # Behind the alarms, whose steps are kept longer.
    observer_order=20,
    probes="features.records.probes:update_probes",
    keeper="features.records.keeper:open_keeper",
)


def keeps_records(config: PPOConfig) -> bool:
    """Says whether a run with this config records its episodes."""
    return config.section(RecordsSettings).keep_gib > 0


def set_records_aside(folder: Path) -> None:
    """Moves the records in a folder to FOLDER.old, out of the way of others."""
    from features.records.record_shelf import GIB, RecordShelf

    RecordShelf(folder, GIB).set_aside()


def write_episodes(
    folder: Path, batch: DataProto, tokenizer: PreTrainedTokenizerBase | None = None
) -> Path:
    """Writes the episodes of a batch that was played to the folder, at once; returns the file.

    Args:
        tokenizer: is saved beside them, where there is none, to make text of their ids.
    """
    from features.records import episode_files
    from features.records.record_shelf import TOKENIZER

    if tokenizer is not None and not (folder / TOKENIZER).is_dir():
        tokenizer.save_pretrained(str(folder / TOKENIZER))
    return episode_files.write_episodes(folder, batch)
