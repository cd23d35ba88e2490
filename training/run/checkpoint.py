"""Saves a run's checkpoints while it goes on; `CheckpointSaver` does it, one at a time.

    checkpoint_contents.py   what a checkpoint holds
    checkpoint_names.py      how its folder gets its name
    checkpoint_manifest.py   how its files are checked
    checkpoint_folders.py    how it is found again, and pruned

Invariant: a save that fails costs that checkpoint alone: training goes on, and the older
checkpoints stay.
"""

import logging
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

from data.disk_errors import limit_reached
from training.config.schema.trainer import TrainerConfig
from training.config.section import PROJECT_ROOT
from training.run.checkpoint_contents import (
    MANIFEST,
    DriverSnapshot,
    save_driver_state,
    save_in_flight,
)
from training.run.checkpoint_folders import prune, saved_steps
from training.run.checkpoint_names import (
    complete_checkpoint,
    give_name,
    make_temporary,
    start_checkpoint,
)
from training.run.files import from_here
from training.run.worker_group_protocol import TrainedGroup

logger = logging.getLogger(__name__)

# With trainer.save_freq=null: seconds of training that a crash may cost, and checkpoints that stay.
SAVE_EVERY_S = 600.0
TIMED_SAVES_KEPT = 2
# As a `save_freq`.
NEVER = -1
# How long a save is waited for when a rank has failed: the others may stand in the midst of a
# collective, and never come to answer.
FAILED_RANK_WAIT_S = 60.0


class CheckpointError(OSError):
    """Reports that a checkpoint could not be written; training itself is sound."""


class CheckpointSaver:
    """Saves a run's checkpoints while it goes on, one at a time.

        begin -> the workers copy and write -> poll: all have written
              -> a thread writes the manifest, forces to disk, renames, prunes

    A save that fails (a full disk) is logged and its folder removed; `close` raises if it was the
    last one.

    Args:
        run_dir: the run's folder.
        groups: the worker group that writes each folder of a checkpoint.
        config: when to save, and how many checkpoints stay.
        on_saved: is told each step whose checkpoint is complete.

    Attributes:
        step: the step that was saved last, or is being saved.
    """

    def __init__(
        self,
        run_dir: Path,
        groups: Mapping[str, TrainedGroup],
        config: TrainerConfig,
        on_saved: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.run_dir = run_dir
        self.groups = groups
        self.on_saved = on_saved
        self.frequency = config.save_freq
        kept_by_default = TIMED_SAVES_KEPT if config.save_freq is None else None
        self._keep_actor = config.max_actor_ckpt_to_keep or kept_by_default
        self._keep_critic = config.max_critic_ckpt_to_keep or kept_by_default
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # The step of the last save.
        self.step = 0
        self._began = time.monotonic()
        self._error: OSError | None = None
        # The folder of the save under way.
        self._folder: Path | None = None
        self._completion: Future[None] | None = None

    def is_due(self, step: int, last: int, step_s: float) -> bool:
        """Checks whether this step is saved.

        It is by `save_freq`, or, without one, before another step as long makes SAVE_EVERY_S full.
        """
        if self.frequency is None:
            since_last_save = time.monotonic() - self._began
            return step >= last or since_last_save + step_s > SAVE_EVERY_S
        return self.frequency > 0 and (step >= last or step % self.frequency == 0)

    def begin(self, snapshot: DriverSnapshot) -> None:
        """Starts to save the step that the snapshot is of, once the save before has ended.

        Raises:
            CannotSave: a part of the run holds what no checkpoint can keep. Whatever is raised, the
                older checkpoints stay.
        """
        self.poll(wait=True)
        saved_before = self.step
        self.step = snapshot.state.global_steps
        self._began = time.monotonic()
        self._error = None
        try:
            self._folder = start_checkpoint(self.run_dir, self.step)
            self._write(self._folder, snapshot)
        except OSError as error:
            self._give_up(error)
        # Ctrl-C too: what is half written must never get a name.
        except BaseException as error:
            step = self.step
            self.step = saved_before
            self._abandon(error)
            error.add_note(f"step {step} is not saved: {self.run_dir} {self._what_is_left()}")
            raise

    def save_to(self, folder: Path, snapshot: DriverSnapshot) -> Path:
        """Saves to a folder of any name, and returns it when it is there.

        A checkpoint that the folder held goes.

        Raises:
            ValueError: it holds anything else.
        """
        holds_other_files = folder.is_dir() and any(folder.iterdir())
        if folder.is_file() or (holds_other_files and not (folder / MANIFEST).exists()):
            raise ValueError(
                f"{folder} holds what is no checkpoint; name another folder, or one in it"
            )
        self.poll(wait=True)
        temporary = make_temporary(folder.absolute())
        self._write(temporary, snapshot)
        for group in self.groups.values():
            group.checkpoint_written(wait=True)
        give_name(temporary, folder)
        return folder

    @contextmanager
    def ends_saves(
        self,
        last_whole: Callable[[], DriverSnapshot | None],
        behind_error: Callable[[Exception], DriverSnapshot | None] = lambda error: None,
    ) -> Iterator[None]:
        """Waits for the save under way, however the block ends; its error is what is raised.

        Args:
            last_whole: the end of the last step, which an interrupted block saves first; None: its
                weights are in the midst of a step.
            behind_error: likewise, of a block that an error ended, where there are saves at all.
        Raises:
            CheckpointError: the block, or what interrupted it, ended well, and the last save did
                not.
        """
        try:
            yield
        except KeyboardInterrupt:
            snapshot = last_whole()
            if snapshot is None:
                self._wait_after_error(math.inf)
            else:
                self.save_interrupted(snapshot)
            raise
        except Exception as error:
            if _is_of_a_rank(error):
                self._wait_after_error(FAILED_RANK_WAIT_S)
            else:
                self._save_behind_error(behind_error(error))
            raise
        except BaseException:
            self._wait_after_error(math.inf)
            raise
        self.close()

    def _save_behind_error(self, snapshot: DriverSnapshot | None) -> None:
        """Saves the last step behind an error; what goes wrong with it is logged."""
        if snapshot is None or self.frequency == NEVER:
            self._wait_after_error(math.inf)
            return
        try:
            self.save_interrupted(snapshot)
        # The error that ended the run is what is raised, not that of its save.
        except Exception as error:
            step = snapshot.state.global_steps
            logger.error("no checkpoint of step %d in %s: %s", step, self.run_dir, error)

    def _wait_after_error(self, longest_s: float) -> None:
        """Waits for the save under way; what goes wrong with it is logged."""
        if self._folder is None:
            return
        logger.warning("the checkpoint of step %d is being written: waiting for it", self.step)
        if longest_s == math.inf:
            self._poll_to_the_end()
            return
        waiting = Thread(target=self._poll_to_the_end, name="last checkpoint", daemon=True)
        waiting.start()
        waiting.join(longest_s)
        if waiting.is_alive():
            logger.error(
                "no checkpoint of step %d: the ranks have not answered for %g s",
                self.step,
                longest_s,
            )

    def _poll_to_the_end(self) -> None:
        try:
            self.poll(wait=True)
        # A rank that died raises errors of Ray's.
        except Exception as error:
            logger.error("no checkpoint of step %d in %s: %s", self.step, self.run_dir, error)

    def save_interrupted(self, snapshot: DriverSnapshot) -> None:
        """Saves the last step of a run that ends before its time, if that is not saved yet.

        Waits for it, and logs how the run goes on.
        """
        if self.step < snapshot.state.global_steps:
            self.begin(snapshot)
        self.close()
        if self.step:
            command = [
                from_here(Path(sys.executable)),
                from_here(PROJECT_ROOT / "main.py"),
                str(self.run_dir / "config.yaml"),
                "trainer.resume_mode=auto",
            ]
            logger.info(
                f"saved step {self.step} in {self.run_dir}; it goes on with: {shlex.join(command)}"
            )

    def load_groups(self, checkpoint: Path, step: int) -> None:
        """Loads every worker group's folder of a checkpoint; one that it lacks starts anew.

        A checkpoint of this run is its last save, which is not written once more.
        """
        if checkpoint.parent.absolute() == self.run_dir.absolute():
            self.step = step
        for name, group in self.groups.items():
            if (checkpoint / name).exists():
                group.load_checkpoint(str(checkpoint / name))
            else:
                logger.warning("%s holds no %s, which starts anew", checkpoint, name)

    def _write(self, folder: Path, snapshot: DriverSnapshot) -> None:
        """Writes the driver's part, and has the workers begin theirs."""
        save_in_flight(folder, snapshot.in_flight)
        save_driver_state(folder, snapshot.state)
        for name, group in self.groups.items():
            group.save_checkpoint(str(folder / name))

    def poll(self, wait: bool = False) -> None:
        """Takes the save under way as far as it has come; with `wait` to its end."""
        if self._folder is None:
            return
        try:
            if self._completion is None:
                if not self._workers_have_written(wait):
                    return
                self._completion = self._thread.submit(self._complete, self._folder)
            if wait or self._completion.done():
                self._completion.result()
                self._folder = None
                self._completion = None
                self.on_saved(self.step)
        except OSError as error:
            self._give_up(error)
        # Not Ctrl-C, behind which the save goes on.
        except Exception as error:
            self._abandon(error)
            raise

    def _workers_have_written(self, wait: bool) -> bool:
        return all(group.checkpoint_written(wait) for group in self.groups.values())

    def _complete(self, folder: Path) -> None:
        step = complete_checkpoint(folder)
        try:
            prune(self.run_dir, step, keep_actor=self._keep_actor, keep_critic=self._keep_critic)
        except OSError as error:
            logger.error("step %d is saved, but older ones cannot be removed: %s", step, error)

    def close(self) -> None:
        """Waits for the save under way.

        Raises:
            CheckpointError: the last save failed; names why, and which checkpoint there is.
        """
        self.poll(wait=True)
        if self._error is None:
            return
        # The error itself: what Ray hands on from a rank begins with the traceback there.
        reason = str(self._error).strip().splitlines()[-1]
        raise CheckpointError(
            f"the last checkpoint, of step {self.step}, was not saved ({limit_reached(reason)}); "
            f"{self.run_dir} {self._what_is_left()}: {reason}"
        ) from self._error

    def _what_is_left(self) -> str:
        """Says, behind the name of the run's folder, which checkpoint it holds."""
        earlier = [step for step in saved_steps(self.run_dir) if step <= self.step]
        return f"keeps the one of step {earlier[-1]}" if earlier else "holds no other"

    def _give_up(self, error: OSError) -> None:
        logger.error(
            "no checkpoint of step %d in %s, the run goes on without: %s",
            self.step,
            self.run_dir,
            error,
        )
        self._error = error
        self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        """Gives up the save under way, so that its folder never gets a name, and removes it."""
        folder = self._folder
        self._folder = None
        self._completion = None
        # The folder is removed when nobody writes to it any more; dead ranks would never say so.
        if not _is_of_a_rank(error) or isinstance(error, OSError):
            for group in self.groups.values():
                with suppress(Exception):
                    group.checkpoint_written(wait=True)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _is_of_a_rank(error: BaseException) -> bool:
    """Checks whether an error comes from a rank in another process, which may have died."""
    return type(error).__module__.startswith("ray.")
