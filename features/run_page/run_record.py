"""Records a run as it goes on: its events and its page.

`RunRecord` is told of each step and of how the run ends. Invariant: nothing of it can end a run or
change its numbers; a validation alone leaves both files as they are.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from data.watchdog import ATTEMPT
from features.alarms.monitor import Ringing
from features.run_page.events import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    OF_PROCESSES,
    Event,
    EventLog,
    describe_error,
)
from features.run_page.run_folder import RunFolder
from features.run_page.start_facts import command_line, versions
from features.run_page.writer import PageWriter
from training.run.checkpoint_folders import saved_steps
from training.run.recorded_config import Changes
from training.run.validation_names import is_validation_mean, short_name

logger = logging.getLogger(__name__)

MOST_VALIDATION_REWARDS = 4


class RunRecord(AbstractContextManager["RunRecord"]):
    """Writes a run's events.jsonl and report.html; a context manager around its steps.

    Args:
        run_dir: the run's folder.
        step: that it goes on from; 0: a new run.
        total_steps: of the whole run.
        changes: of settings, with which it goes on.
        has_page: whether report.html is written, too.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        total_steps: int,
        changes: Changes,
        *,
        has_page: bool,
    ) -> None:
        self.run_dir = run_dir
        self.step = step
        self.total_steps = total_steps
        self.changes = changes
        self.has_page = has_page
        self.log = EventLog(run_dir)
        self.folder = RunFolder(run_dir)
        self.page: PageWriter | None = None
        self._saved: set[int] = set()
        self._warned = False

    def __enter__(self) -> Self:
        with self._costing_itself_alone():
            self._begin()
        return self

    def _begin(self) -> None:
        is_restart = os.environ.get(ATTEMPT, "1") != "1"
        kept = self.log.begin(self.step, is_restart=is_restart)
        self._tell_of_a_kill(kept)
        self._saved = set(saved_steps(self.run_dir))
        kind = "resume" if self.step > 0 else "start"
        self.log.add(
            kind,
            step=self.step,
            command=command_line(),
            versions=versions(),
            total_steps=self.total_steps,
        )
        if self.changes:
            self._add_changes()
        if self.has_page:
            self.folder = RunFolder.read(self.run_dir, is_own=True)
            self.page = PageWriter(self.folder)
            self.page.write()

    def _tell_of_a_kill(self, events: Sequence[Event]) -> None:
        """Adds the end of the process before, where that could not."""
        of_processes = [event for event in events if event["kind"] in OF_PROCESSES]
        if of_processes and of_processes[-1]["kind"] in ("start", "resume"):
            text = "the process before ended without a word, which this one found when it began"
            self.log.add("end", step=self.step, name="killed", text=text, exit=FAILED)

    @contextmanager
    def _costing_itself_alone(self) -> Iterator[None]:
        """Logs what goes wrong with the record, once: files of a folder may be anything."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "the record of %s lacks something, the run goes on: %s: %s",
                    self.run_dir,
                    type(error).__name__,
                    error,
                )
            self._warned = True

    def _add_changes(self) -> None:
        self.log.add(
            "settings",
            step=self.step,
            text=f"{len(self.changes)} settings changed: {', '.join(self.changes)}",
            changed={key: list(values) for key, values in self.changes.items()},
        )

    def add(self, step: int, metrics: Mapping[str, float], alarms: Sequence[Ringing] = ()) -> None:
        """Adds a step, once its metrics are logged, with the alarms that it said."""
        with self._costing_itself_alone():
            self._add(step, metrics, alarms)

    def _add(self, step: int, metrics: Mapping[str, float], alarms: Sequence[Ringing]) -> None:
        self.step = step
        for alarm in alarms:
            self._event("alarm", name=alarm.alarm, text=alarm.text, view=alarm.view)
        rewards = describe_validation(metrics)
        if rewards:
            self._event("validation", text=rewards)
        self._add_checkpoints()
        if self.page is not None:
            self.folder.metrics.add(step, {name: float(metrics[name]) for name in metrics})
            self.page.write_if_due()

    def _add_checkpoints(self) -> None:
        """Adds the checkpoints that are complete since the last look."""
        saved = set(saved_steps(self.run_dir))
        for step in sorted(saved - self._saved):
            self._event("checkpoint", at=step, text=f"the checkpoint of step {step} is complete")
        self._saved |= saved

    def _event(self, kind: str, at: int | None = None, **parts: Any) -> None:
        """Adds an event of this step, or of the step `at`."""
        event = self.log.add(kind, step=self.step if at is None else at, **parts)
        self.folder.events.append(event)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._costing_itself_alone():
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._add_checkpoints()
        if error is None:
            self._event("end", exit=FINISHED, text=f"it came to its end at step {self.step}")
        elif isinstance(error, KeyboardInterrupt):
            text = f"it was interrupted after step {self.step}"
            self._event("end", exit=INTERRUPTED, text=text)
        else:
            name = type(error).__name__
            self._event("end", exit=FAILED, name=name, text=describe_error(error))
        if self.page is not None:
            self.page.write()


def describe_validation(metrics: Mapping[str, float]) -> str:
    """Says a step's validation rewards in one line; "" where it has none."""
    means = [name for name in metrics if is_validation_mean(name)]
    parts = [f"{short_name(name)} {metrics[name]:.4g}" for name in means]
    left_out = len(parts) - MOST_VALIDATION_REWARDS
    more = [f"{left_out} more"] if left_out > 0 else []
    return ", ".join([*parts[:MOST_VALIDATION_REWARDS], *more])


class NoRecord(RunRecord):
    """Records nothing, as of a validation alone."""

    def __enter__(self) -> Self:
        return self

    def add(self, step: int, metrics: Mapping[str, float], alarms: Sequence[Ringing] = ()) -> None:
        """Leaves the files as they are."""

    def __exit__(self, *raised: object) -> None:
        """Leaves the files as they are."""


def open_record(trainer: Any, changes: Changes) -> RunRecord:
    """Opens the record of a trainer's run, which goes on from its `global_steps`.

    Args:
        changes: of settings, with which it goes on.
    """
    settings = trainer.config.trainer
    record_class = NoRecord if settings.val_only else RunRecord
    return record_class(
        trainer.run_dir,
        trainer.global_steps,
        trainer.total_training_steps,
        changes,
        has_page="file" in settings.logger,
    )
