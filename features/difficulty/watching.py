"""Adds the sampler's metrics to a step's, and shows on the run's page how its tasks stand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import astuple

from features.difficulty.sampler import DifficultySampler
from features.difficulty.settings import DifficultySettings
from training.features import features
from training.observers import ObservedRun, Observer, StepReport

# Seconds between two tables, as between two pages.
PAUSE_S = 30.0
# The feature that shows the table.
PAGE = "run_page"
HEADINGS = (
    "task",
    "pool",
    "solve rate",
    "spread of rewards",
    "groups",
    "failed episodes",
    "tokens",
    "last played at step",
)


def open_observer(run: ObservedRun) -> DifficultyObserver | None:
    """Opens the observer; None where another sampler, or none, gives the tasks."""
    sampler = run.sampler
    if not isinstance(sampler, DifficultySampler):
        return None
    return DifficultyObserver(run, sampler)


class DifficultyObserver(Observer):
    """Reads what the sampler remembers."""

    def __init__(self, run: ObservedRun, sampler: DifficultySampler) -> None:
        self.run = run
        self.sampler = sampler
        self.most = run.config.section(DifficultySettings).table_tasks
        has_page = PAGE in features() and "file" in run.config.trainer.logger
        self.shows = has_page and self.most > 0 and not run.config.trainer.val_only
        self._last_table = -PAUSE_S

    def step_made(self, report: StepReport) -> Mapping[str, float]:
        """Returns the sizes of the pools, and what the step's tokens were spent on."""
        return self.sampler.step_metrics

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Writes the table, from time to time."""
        if self.shows and time.monotonic() - self._last_table >= PAUSE_S:
            self._write_table()

    def run_ended(self, error: BaseException | None) -> None:
        """Writes the table as it is at the end."""
        if self.shows:
            self._write_table()

    def _write_table(self) -> None:
        from features.run_page.feature import write_table

        rows = [astuple(numbers) for numbers in self.sampler.numbers(self.most)]
        left_out = int((self.sampler.memory.groups > 0).sum()) - len(rows)
        note = ""
        if left_out > 0:
            note = f"{left_out:,} further tasks that were played took fewer tokens."
        write_table(
            self.run.run_dir,
            "difficulty",
            title="Tasks by difficulty",
            headings=HEADINGS,
            rows=rows,
            note=note,
        )
        self._last_table = time.monotonic()
