"""Tells of a run as it goes on: its trackers, its events and page, its episodes.

`RayPPOTrainer.fit` opens one `RunLog` and tells it of each step. Invariant: nothing of it changes a
number of the run; what fails in it costs its own lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

from features.run_page.run_record import open_record
from features.trackers import open_trackers
from training.run.recorded_config import record_config


class RunLog(AbstractContextManager["RunLog", None]):
    """Hands a trainer's steps on to all that writes of them; a context manager around its steps.

    Args:
        trainer: a RayPPOTrainer, which goes on from its `global_steps`.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        step = trainer.global_steps
        changes = record_config(trainer.run_dir, trainer.config, step)
        self.tracking = open_trackers(
            trainer.config, trainer.run_dir, step, trainer.total_training_steps
        )
        self.record = open_record(trainer, changes)
        self.opened = ExitStack()

    def __enter__(self) -> Self:
        self.opened.enter_context(self.record)
        self.opened.enter_context(self.tracking)
        self.opened.enter_context(self.trainer.recorder.flushed())
        return self

    def __exit__(self, *raised: Any) -> None:
        self.opened.__exit__(*raised)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Adds the step that the trainer is at; `metrics` of a validation, or of a whole step."""
        trainer = self.trainer
        step = trainer.global_steps
        self.tracking.log_generations(trainer.val_generations, step=step)
        trainer.val_generations = []
        if metrics:
            self.tracking.log(metrics, step=step)
            self.record.add(step, metrics, trainer.alarms.said)
