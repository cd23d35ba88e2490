"""Makes the viewer of a run with the run: links on the run's page lead somewhere from its start on.

    run_started    a viewer without episodes, which says that they are to come
    step_logged    what is new is added, in a process of the least priority (`follower`)
    run_ended      made once more, with all episodes

Invariant: it reads what lies on disk and writes the viewer; it changes no number of the run, and
what goes wrong costs the viewer alone. The process is asked at most so often that it computes
LARGEST_SHARE of the time.
"""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from features.viewer.build import RecordedRun, build_viewer
from features.viewer.command import find_run
from features.viewer.follower import ENDED, GOES_ON, MADE, Follower
from features.viewer.records import list_files
from training.config import PPOConfig
from training.features import features
from training.observers import ObservedRun, Observer

logger = logging.getLogger(__name__)

# The feature whose records are shown.
RECORDS = "records"
# A run that is over before needs no process.
FIRST_PAUSE_S = 60.0
LEAST_PAUSE_S = 20.0
# What is not made while the run goes on is to be waited for at its end.
LARGEST_SHARE = 0.25
# Records of so many bytes are shown in this process, in the seconds that another takes to start.
SMALL_BYTES = 16 << 20
# So long the end of a run waits for the viewer of all that it played.
END_S = 60.0


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
        self._follower: Follower | None = None
        self._warned = False
        self._asked_at = 0.0
        self._next = time.monotonic() + FIRST_PAUSE_S

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
        """Has it made anew where there is time for it."""
        if self._follower is not None and self._follower.is_asked:
            answer = self._follower.answer(timeout_s=0.0)
            if answer is None:
                return
            seconds = time.monotonic() - self._asked_at
            self._next = time.monotonic() + max(LEAST_PAUSE_S, seconds / LARGEST_SHARE)
            self._hear(answer)
        if time.monotonic() >= self._next:
            with self._lacking_it():
                self._ask(GOES_ON)

    def run_ended(self, error: BaseException | None) -> None:
        """Makes it of all that was played; whoever interrupts a run does not wait for it."""
        if not isinstance(error, KeyboardInterrupt):
            with self._lacking_it():
                self._make_whole()
        self._stop()

    def closed(self) -> None:
        """Ends the process, where one is left."""
        self._stop()

    def _make_whole(self) -> None:
        try:
            run = find_run(self.run.run_dir, 0)
        except ValueError:
            # Nothing was played.
            return
        size = sum(file.path.stat().st_size for file in list_files(run.episodes))
        if self._follower is None and size <= SMALL_BYTES:
            build_viewer([run], self.folder, shows_progress=False)
            return
        deadline = time.monotonic() + END_S
        follower = self._follower
        if follower is not None and follower.is_asked and follower.answer(timeout_s=END_S) is None:
            return
        answer = self._ask(ENDED).answer(timeout_s=max(0.0, deadline - time.monotonic()))
        if answer is not None:
            self._hear(answer)

    def _ask(self, word: str) -> Follower:
        """Asks the process, which is started where there is none, to make the viewer."""
        if self._follower is None:
            self._follower = Follower(self.run.run_dir)
        self._asked_at = time.monotonic()
        self._follower.ask(word)
        return self._follower

    def _hear(self, answer: str) -> None:
        """Logs why there is no viewer, where the answer says so; the next one is another's."""
        if answer == MADE:
            return
        self._warn(answer)
        self._stop()

    def _stop(self) -> None:
        if self._follower is None:
            return
        is_left = self._follower.stop()
        self._follower = None
        if is_left:
            for begun in self.run.run_dir.glob("viewer.*.new"):
                shutil.rmtree(begun, ignore_errors=True)

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
