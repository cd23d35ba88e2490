"""Makes the viewer of a run with the run: links on the run's page lead somewhere from its start on.

    run_started    a viewer without episodes, which says that they are to come
    step_logged    made again, in a process of the least priority, while the run goes on
    run_ended      made once more, with all episodes

Invariant: it reads what lies on disk and writes the viewer; it changes no number of the run, and
what goes wrong costs the viewer alone. The process computes while nobody else wants to, and one
begins at most so often that it takes LARGEST_SHARE of the time.
"""

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from features.viewer.build import RecordedRun, build_viewer
from features.viewer.command import find_run
from features.viewer.records import list_files
from training.config import PPOConfig
from training.config.section import PROJECT_ROOT
from training.features import features
from training.observers import ObservedRun, Observer

logger = logging.getLogger(__name__)

# The feature whose records are shown.
RECORDS = "records"
LEAST_PAUSE_S = 60.0
LARGEST_SHARE = 0.05
# Records of so many bytes are shown in this process, in about a second.
SMALL_BYTES = 4 << 20
# So long the end of a run waits for the viewer of all that it played.
END_S = 60.0
STOP_S = 5.0


def open_live_viewer(run: ObservedRun) -> "LiveViewer | None":
    """Opens what makes a run's viewer; None where the run has no page, or records nothing new."""
    trainer = run.config.trainer
    if trainer.val_only or "file" not in trainer.logger or not records_episodes(run.config):
        return None
    return LiveViewer(run)


def records_episodes(config: PPOConfig) -> bool:
    """Says whether a run with this config has episodes for a viewer."""
    if RECORDS not in features():
        return False
    from features.records.feature import keeps_records

    return keeps_records(config)


class LiveViewer(Observer):
    """Makes RUN_DIR/viewer while a run goes on.

    Args:
        run: the run.
    """

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._warned = False
        self._began = 0.0
        self._next = time.monotonic() + LEAST_PAUSE_S

    @property
    def folder(self) -> Path:
        """Returns the viewer's folder."""
        return self.run.run_dir / "viewer"

    def run_started(self, step: int, in_flight: Sequence[int]) -> None:
        """Makes a viewer without episodes, unless the run goes on and has one."""
        if step > 0 and (self.folder / "index.html").is_file():
            return
        empty = RecordedRun(
            number=0, folder=self.run.run_dir, episodes=self.run.run_dir / "episodes"
        )
        with self._lacking_it():
            build_viewer([empty], self.folder, goes_on=True, with_episodes=False)

    def step_logged(self, metrics: Mapping[str, float]) -> None:
        """Begins to make it anew where there is time for it."""
        if self._process is not None:
            if self._process.poll() is None:
                return
            seconds = time.monotonic() - self._began
            self._next = time.monotonic() + max(LEAST_PAUSE_S, seconds / LARGEST_SHARE)
            self._tell_failure(self._process.returncode)
            self._process = None
        if time.monotonic() >= self._next:
            with self._lacking_it():
                self._process = self._begin("--goes-on")

    def run_ended(self, error: BaseException | None) -> None:
        """Makes it of all that was played; whoever interrupts a run does not wait for it."""
        self._stop()
        if isinstance(error, KeyboardInterrupt):
            return
        with self._lacking_it():
            self._make_whole()

    def _make_whole(self) -> None:
        try:
            run = find_run(self.run.run_dir, 0)
        except ValueError:
            # Nothing was played.
            return
        size = sum(file.path.stat().st_size for file in list_files(run.episodes))
        if size <= SMALL_BYTES:
            build_viewer([run], self.folder, shows_progress=False)
            return
        self._process = self._begin()
        with suppress(subprocess.TimeoutExpired):
            self._tell_failure(self._process.wait(timeout=END_S))
        self._stop()

    def closed(self) -> None:
        """Ends the process, where one is left."""
        self._stop()

    def _begin(self, *options: str) -> "subprocess.Popen[bytes]":
        """Starts a process that makes the viewer, and computes while nobody else wants to."""
        self._began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            "features.viewer.command",
            str(self.run.run_dir.absolute()),
        ]
        process = subprocess.Popen(
            [*command, *options],
            cwd=PROJECT_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 19)
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return process

    def _stop(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            # As Ctrl-C: it takes away what it has begun.
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
                for begun in self.run.run_dir.glob("viewer.*.new"):
                    shutil.rmtree(begun, ignore_errors=True)
        self._process = None

    def _tell_failure(self, exit_code: int) -> None:
        """Logs that the process that makes the viewer has failed."""
        if exit_code:
            self._warn(
                f"exit code {exit_code} of `python -m features.viewer.command {self.run.run_dir}`, "
                "which says why"
            )

    @contextmanager
    def _lacking_it(self) -> Iterator[None]:
        """Logs what goes wrong in the block, and goes on: a viewer is no reason to end a run."""
        try:
            yield
        except (OSError, ValueError) as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        """Logs why there is no viewer, once in a run."""
        if not self._warned:
            logger.warning("the viewer of the run is not made, the run goes on: %s", reason)
        self._warned = True
