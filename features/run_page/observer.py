"""Records a run as it goes on: its events and its page.

Invariant: nothing of it can end a run or change its numbers; a validation alone leaves both files
as they are.
"""

import logging
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from data.watchdog import ATTEMPT
from features.run_page.announcement import say_where
from features.run_page.code_state import code_digest, git, write_diff
from features.run_page.events import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    OF_PROCESSES,
    Event,
    EventLog,
    describe_error,
)
from features.run_page.run_folder import RunFolder, code_of
from features.run_page.writer import PageWriter
from training.config.reference import to_yaml
from training.config.section import PROJECT_ROOT
from training.observers import Generations, Notice, ObservedRun, Observer, StepReport
from training.run.recorded_config import flat_settings
from training.run.validation_names import is_validation_mean, short_name

logger = logging.getLogger(__name__)

MOST_VALIDATION_REWARDS = 4
# Whose versions a run depends on.
PACKAGES = ("torch", "transformers", "vllm", "ray", "numpy")
MOST_COMMAND_CHARS = 4000
# Names the commit, and says whether files differ from it.
DESCRIBE = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")


def open_page(run: ObservedRun) -> "RunRecord | None":
    """Opens the record of a run; None of a validation alone."""
    trainer = run.config.trainer
    if trainer.val_only:
        return None
    return RunRecord(run, has_page="file" in trainer.logger)


class RunRecord(Observer):
    """Writes a run's events.jsonl and report.html.

    Args:
        run: the run.
        has_page: whether report.html is written, too.
    """

    def __init__(self, run: ObservedRun, *, has_page: bool) -> None:
        self.run = run
        self.has_page = has_page
        self.log = EventLog(run.run_dir)
        self.folder = RunFolder(run.run_dir)
        self.page: PageWriter | None = None
        # What observers found in the step that is to be logged.
        self.notices: list[Notice] = []
        self._warned = False

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        """Adds the start of this process, and writes the page."""
        with self._lacking_something():
            self._begin(step)

    def _begin(self, step: int) -> None:
        run = self.run
        self.log = EventLog(run.run_dir)
        is_restart = os.environ.get(ATTEMPT, "1") != "1"
        kept = self.log.begin(step, is_restart=is_restart)
        self._tell_of_a_kill(kept)
        kind = "resume" if step > 0 else "start"
        code = code_digest(flat_settings(to_yaml(run.config)))
        self.log.add(
            kind,
            step=step,
            command=command_line(),
            versions=versions() | {"code": code},
            total_steps=run.total_steps,
        )
        write_diff(run.run_dir)
        if kind == "resume":
            self._compare_code(code, kept)
        if run.changes:
            self._add_changes()
        self.page = None
        self.folder = RunFolder(run.run_dir)
        if self.has_page:
            self.folder = RunFolder.read(run.run_dir, is_own=True)
            self.page = PageWriter(self.folder)
            self.page.write()
            if not is_restart:
                # The attempt before has said it.
                say_where(run.config, run.run_dir)

    def _compare_code(self, code: str, events: Sequence[Event]) -> None:
        """Tells where the code is not that of the steps before."""
        before = code_of(events)
        if not before or before == code:
            return
        logger.info("the code is not that of the steps before (%s now, %s then)", code, before)
        self.log.add(
            "settings",
            step=self.run.step,
            text="the code changed",
            changed={"code": [before, code]},
        )

    def _tell_of_a_kill(self, events: Sequence[Event]) -> None:
        """Adds the end of the process before, where that could not."""
        of_processes = [event for event in events if event["kind"] in OF_PROCESSES]
        if of_processes and of_processes[-1]["kind"] in ("start", "resume"):
            text = "the process before ended without a word, which this one found when it began"
            self.log.add("end", step=self.run.step, name="killed", text=text, exit=FAILED)

    @contextmanager
    def _lacking_something(self) -> Iterator[None]:
        """Logs what goes wrong in the block, once, and goes on: files may hold anything."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                logger.warning(
                    "the record of %s lacks something, the run goes on: %s: %s",
                    self.run.run_dir,
                    type(error).__name__,
                    error,
                )
            self._warned = True

    def _add_changes(self) -> None:
        changes = self.run.changes
        self.log.add(
            "settings",
            step=self.run.step,
            text=f"{len(changes)} settings changed: {', '.join(changes)}",
            changed={key: list(values) for key, values in changes.items()},
        )

    def step_made(self, report: StepReport) -> None:
        """Keeps the list of what observers find in the step; later ones may still add to it."""
        self.notices = report.notices

    def validated(self, step: int, metrics: Mapping[str, float], generations: Generations) -> None:
        """Adds a validation's rewards."""
        rewards = describe_validation(metrics)
        if rewards:
            self._event("validation", text=rewards)

    def checkpoint_saved(self, step: int) -> None:
        """Adds the checkpoint."""
        self._event("checkpoint", at=step, text=f"the checkpoint of step {step} is complete")

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Adds the step to the page, with what was found in it."""
        for notice in self.notices:
            self._event("alarm", name=notice.name, text=notice.text, view=notice.view)
        self.notices = []
        with self._lacking_something():
            if self.page is not None:
                values = {name: float(value) for name, value in metrics.items()}
                self.folder.metrics.add(self.run.step, values)
                self.page.write_if_due()

    def _event(self, kind: str, at: int | None = None, **parts: Any) -> None:
        """Adds an event of this step, or of the step `at`."""
        with self._lacking_something():
            step = self.run.step if at is None else at
            event = self.log.add(kind, step=step, **parts)
            self.folder.events.append(event)

    def run_ended(self, error: BaseException | None) -> None:
        """Adds how the run ended, and writes the page."""
        step = self.run.step
        if error is None:
            self._event("end", exit=FINISHED, text=f"it came to its end at step {step}")
        elif isinstance(error, KeyboardInterrupt):
            self._event("end", exit=INTERRUPTED, text=f"it was interrupted after step {step}")
        else:
            name = type(error).__name__
            self._event("end", exit=FAILED, name=name, text=describe_error(error))
        with self._lacking_something():
            if self.page is not None:
                self.page.write()

    def summary(self) -> str:
        """Draws the reward's curve, and returns the run's table with where the curve is."""
        # Drawing needs packages that take a while to load.
        from features.run_page.report import NoRewards, write_report

        if not self.has_page:
            return ""
        run_dir = self.run.run_dir
        try:
            table = write_report(run_dir)
        except NoRewards:
            return f"page: {run_dir / 'report.html'}"
        except (OSError, ValueError) as error:
            if self.page is None or not self.page.has_failed:
                logger.warning("no report of %s: %s", run_dir, error)
            return ""
        return f"{table}\nreward curve: {run_dir / 'report.png'}; page: {run_dir / 'report.html'}"


def describe_validation(metrics: Mapping[str, float]) -> str:
    """Says a step's validation rewards in one line; "" where it has none."""
    means = [name for name in metrics if is_validation_mean(name)]
    parts = [f"{short_name(name)} {metrics[name]:.4g}" for name in means]
    left_out = len(parts) - MOST_VALIDATION_REWARDS
    more = [f"{left_out} more"] if left_out > 0 else []
    return ", ".join([*parts[:MOST_VALIDATION_REWARDS], *more])


def command_line() -> str:
    """Returns the command that started this process, as a shell takes it."""
    return shlex.join(sys.orig_argv)[:MOST_COMMAND_CHARS]


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that a run depends on.

    Nothing is imported. `commit` is the project's, where its folder is a git repository; -dirty
    says that files differ from it.
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    commit = git(PROJECT_ROOT, *DESCRIBE).strip()
    if commit:
        found["commit"] = commit
    return found
