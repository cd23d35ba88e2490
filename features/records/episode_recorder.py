"""Records what a run plays and trains on, so that pages can be made from disk later.

    STEP.jsonl, val-STEP.jsonl   the episodes, as they were played        episode_entries.py
    STEP.npz                     what the update was given, what it made  step_arrays.py
    tokenizer/                   makes text of their ids

Files are written beside the run, by one thread, in the order in which they were handed in.
Invariant: records are read off a batch and change no number of it; whatever goes wrong costs the
records, not the run; and they take no more room than `records.keep_gib`.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from data.protocol import DataProto
from features.records.background_writer import BackgroundWriter
from features.records.episode_entries import (
    RECORDED,
    prompt_episodes,
    take_played_episodes,
    take_scored_episodes,
)
from features.records.episode_files import arrays_file, episode_lines, episodes_file
from features.records.record_shelf import GIB, TOKENIZER, RecordShelf, Unit
from features.records.settings import RecordsSettings
from features.records.step_arrays import Columns, TrainedStep, step_arrays
from features.records.token_record import token_records
from training.batch.dynamic_sampling import DROPPED
from training.observers import ObservedRun, Observer, StepReport

logger = logging.getLogger(__name__)

# The bytes of a file of arrays beside the arrays.
BYTES_OF_HEADERS = 16_384


def open_recorder(run: ObservedRun) -> EpisodeRecorder | None:
    """Opens a run's recorder; None where nothing is recorded."""
    if not run.config.section(RecordsSettings).is_on:
        return None
    return EpisodeRecorder(run)


class EpisodeRecorder(Observer):
    """Records a run's episodes.

    Args:
        run: the run.
    """

    def __init__(self, run: ObservedRun) -> None:
        settings = run.config.section(RecordsSettings)
        self.run = run
        self.config = run.config
        self.tokenizer: Any = run.tokenizer
        self.folder = settings.folder_of(run.run_dir)
        self.shelf = RecordShelf(self.folder, settings.keep_gib * GIB)
        self._writer = BackgroundWriter()
        # The units whose episodes this process has begun to write.
        self._begun: set[Unit] = set()
        self._warned: set[str] = set()
        self._has_started = False
        self._has_tokenizer = False
        self._stale: frozenset[str] = frozenset()
        self._dropped: list[dict[str, str]] = []

    # The run

    def went_to(self, step: int, in_flight: Sequence[int]) -> None:
        """Begins to record behind a step: what is of later ones goes, of another run is set aside.

        The episodes of the steps in flight stay.
        """
        if self.config.trainer.val_only:
            return
        self.flush()
        begins = step == 0 and not self._has_started
        self._has_started = True
        self._begun.clear()
        self._has_tokenizer = False
        try:
            if begins:
                self.shelf.set_aside()
            else:
                self.shelf.cut_back(step, frozenset(in_flight))
        except OSError as error:
            self._warn("records of an earlier run are in the way", error)

    def run_ended(self, error: BaseException | None) -> None:
        """Waits until all that was handed in is written."""
        self.flush()

    def flush(self) -> None:
        """Waits until all that was handed in is written, or the disk seems to hang."""
        if not self._writer.flush():
            self._warn("what is left", TimeoutError(f"{self.folder} takes no more"))

    def closed(self) -> None:
        """Waits as `flush` does, and ends the thread that writes."""
        if not self._writer.close():
            self._warn("what is left", TimeoutError(f"{self.folder} takes no more"))

    # The records

    def validation_begins(self, step: int) -> None:
        """Begins a validation, whose file takes the place of one that was there."""
        unit = Unit(validate=True, step=step)
        self._submit(f"validation of step {step}", lambda: self._begun.discard(unit))

    def played(self, batch: DataProto, step: int, validate: bool) -> None:
        """Records episodes as they were played and paid by their environments."""
        run = self.run
        are_scores = run.val_paid_by_environment if validate else run.paid_by_environment
        if not are_scores:
            return
        entries = take_played_episodes(batch)
        # Greedy answers are baselines: nothing is trained on them.
        if entries and batch.meta_info.get("do_sample", True):
            self._write_entries(_unit_of(batch), lambda: entries)

    def scored(self, batch: DataProto, scores: Tensor) -> None:
        """Records the episodes of a batch that has its scores, unless they are recorded."""
        if "token_level_scores" in batch.batch:
            self._record_scored(batch)

    def _record_scored(self, batch: DataProto) -> None:
        if batch.meta_info.get(RECORDED):
            return
        if "episode_facts" in batch.non_tensor_batch:
            entries = take_scored_episodes(batch)
            if entries:
                self._write_entries(_unit_of(batch), lambda: entries)
            return
        batch.meta_info[RECORDED] = True
        rows = batch.select()
        data = self.config.data
        self._write_entries(
            _unit_of(batch),
            lambda: prompt_episodes(rows, self.tokenizer, data.prompt_key, data.reward_fn_key),
        )

    def update_begins(self, batch: DataProto) -> None:
        """Sees a batch whose update begins, once groups that are too old are masked."""
        self._dropped = batch.meta_info.get(DROPPED, [])
        self._stale = frozenset()
        if self.config.trainer.async_level and "turn_ids" in batch.batch:
            was_sampled = (batch.batch["turn_ids"] >= 0).any(dim=1)
            is_masked = ~batch.batch["response_mask"].bool().any(dim=1)
            uids = batch.non_tensor_batch["uid"][(was_sampled & is_masked).numpy()]
            self._stale = frozenset(str(uid) for uid in uids)

    def step_made(self, report: StepReport) -> None:
        """Records a step: its batch, what the update made of it, and its metrics."""
        self._record_scored(report.batch)
        trained = TrainedStep(
            step=report.step,
            batch=report.batch.select(),
            records=token_records(report.records),
            updates_policy=report.step > self.config.trainer.critic_warmup,
            stale=self._stale,
            dropped=self._dropped,
            metrics=dict(report.metrics),
        )
        self._submit(f"the arrays of step {report.step}", lambda: self._write_arrays(trained))

    # In the thread

    def _write_entries(self, unit: Unit, entries: Callable[[], Any]) -> None:
        """Has the thread write a unit's episodes, or add them to those that it has written."""

        def write() -> None:
            content = episode_lines(entries())
            path = episodes_file(self.folder, unit.step, validate=unit.validate)
            self.shelf.append(unit, path, content, anew=unit not in self._begun)
            self._begun.add(unit)

        self._submit(f"episodes of step {unit.step}", write)

    def _write_arrays(self, trained: TrainedStep) -> None:
        if trained.metrics.get("alarms/count"):
            self.shelf.alarm_steps.add(trained.step)
        columns = step_arrays(trained, self.config)
        size = sum(column.nbytes for column in columns.values()) + BYTES_OF_HEADERS
        self.shelf.write(
            Unit(validate=False, step=trained.step),
            arrays_file(self.folder, trained.step),
            size,
            lambda path: save_columns(path, columns),
        )

    def _save_tokenizer(self) -> None:
        place = self.folder / TOKENIZER
        if not self._has_tokenizer and not place.is_dir():
            self.tokenizer.save_pretrained(str(place))
        self._has_tokenizer = True

    def _submit(self, what: str, write: Callable[[], None]) -> None:
        """Has the thread write."""
        if not self._writer.submit(lambda: self.write(what, write)):
            self._warn(what, TimeoutError(f"{self.folder} takes no more"))

    def write(self, what: str, write: Callable[[], None]) -> None:
        """Writes, in the thread; a failure is logged."""
        try:
            self._save_tokenizer()
            write()
        # A full disk, or a batch or a tokenizer of a user's own, costs the records.
        except Exception as error:
            self._warn(what, error)

    def _warn(self, what: str, error: Exception) -> None:
        """Says what was not recorded, once for each kind of error."""
        kind = type(error).__name__
        if kind not in self._warned:
            logger.warning("%s not recorded, the run goes on: %s: %s", what, kind, error)
        self._warned.add(kind)


def _unit_of(batch: DataProto) -> Unit:
    """Returns the unit that a generated batch's episodes are of."""
    info = batch.meta_info
    return Unit(validate=bool(info.get("validate")), step=int(info.get("global_steps", 0)))


def save_columns(path: Path, columns: Columns) -> None:
    """Writes arrays to a file, uncompressed, as `np.load` reads them.

    They are put together in memory, as an archive takes many small writes.
    """
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **columns)
    path.write_bytes(content.getbuffer())
