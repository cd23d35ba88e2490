"""Checkpoint folders: how they are written, found again, checked and pruned.

    RUN_DIR/global_step_N/{actor,critic}/   written by the workers        RUN_DIR/latest_checkpointed_iteration.txt   N
    RUN_DIR/global_step_N/data.pt           the driver's state: step, place in the data, KL coefficient
    RUN_DIR/global_step_N/manifest.json     size and checksum of every file

Invariant: a folder with the final name is always whole, because a checkpoint is written under a temporary name, forced
to disk and renamed; older ones go only when a newer one is complete. Nothing random needs to be kept: all of it derives
from the run's seed and the step. With several nodes RUN_DIR is a folder that all of them see.
"""

import io
import json
import logging
import math
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch

from data.texts import say
from training.config.settings import TrainerConfig
from training.run.ahead import save_in_flight
from training.run.tracking import force_to_disk, write_atomically

logger = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
DRIVER_STATE = "data.pt"
TEMPORARY = ".incomplete"
# With trainer.save_freq=null: seconds of training that a crash may cost, and checkpoints that stay.
SAVE_EVERY_S = 600.0
TIMED_SAVES_KEPT = 2


class CheckpointError(OSError):
    """Says that a checkpoint could not be written; training itself is sound."""


class CheckpointSaver:
    """Saves a run's checkpoints while it goes on, one at a time.

        begin -> the workers copy and write -> poll: all have written
              -> a thread writes the manifest, forces to disk, renames, prunes

    A save that fails (a full disk) costs that checkpoint alone: it is logged, its folder removed, and the older ones
    stay; `close` raises if it was the last one.

    Args:
        parts: the worker group that writes each folder of a checkpoint, with `save_checkpoint(folder)` and
            `checkpoint_written(wait)`; see `workers.fsdp_workers`.
        config: when to save, and how many checkpoints stay.
    """

    def __init__(self, run_dir: Path, parts: Mapping[str, Any], config: TrainerConfig) -> None:
        self.run_dir, self.parts, self.frequency = run_dir, parts, config.save_freq
        kept = TIMED_SAVES_KEPT if config.save_freq is None else None
        actor, critic = (
            config.max_actor_ckpt_to_keep or kept,
            config.max_critic_ckpt_to_keep or kept,
        )
        self._prune = partial(prune, run_dir, keep_actor=actor, keep_critic=critic)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        # Of the last save.
        self.step, self.began = 0, time.monotonic()
        self._error: OSError | None = None
        # Of the save under way.
        self._folder: Path | None = None
        self._completion: Future[None] | None = None

    def is_due(self, step: int, last: int, step_s: float) -> bool:
        """Says whether this step is saved: by `save_freq`, or before another like it makes SAVE_EVERY_S full."""
        if self.frequency is None:
            return step >= last or time.monotonic() - self.began + step_s > SAVE_EVERY_S
        return self.frequency > 0 and (step >= last or step % self.frequency == 0)

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Starts to save, once the save before has ended; `state` is the driver's."""
        self.poll(wait=True)
        self.step, self.began, self._error = step, time.monotonic(), None
        try:
            self._folder = start_checkpoint(self.run_dir, step)
            self._write(self._folder, state)
        except OSError as error:
            self._give_up(error)

    def save_to(self, folder: Path, state: dict[str, Any]) -> Path:
        """Saves to a folder of any name, and returns it when it is there, in place of a checkpoint that it held.

        Raises:
            ValueError: it holds anything else.
        """
        if folder.is_file() or (
            folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists()
        ):
            raise ValueError(
                f"{folder} holds what is no checkpoint; name another folder, or one in it"
            )
        self.poll(wait=True)
        temporary = folder.absolute().with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
        temporary.mkdir(parents=True)
        self._write(temporary, state)
        for group in self.parts.values():
            group.checkpoint_written(wait=True)
        give_name(temporary, folder)
        return folder

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        save_in_flight(folder, state.get("in_flight", ()))
        save_driver_state(
            folder, {name: part for name, part in state.items() if name != "in_flight"}
        )
        for name, group in self.parts.items():
            group.save_checkpoint(str(folder / name))

    def poll(self, wait: bool = False) -> None:
        """Takes the save under way as far as it has come; with `wait` to its end."""
        if self._folder is None:
            return
        try:
            if self._completion is None:
                if not all(group.checkpoint_written(wait) for group in self.parts.values()):
                    return
                self._completion = self._thread.submit(
                    lambda at: self._prune(complete_checkpoint(at)), self._folder
                )
            if wait or self._completion.done():
                self._completion.result()
                self._folder = self._completion = None
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Waits for the save under way.

        Raises:
            CheckpointError: the last save failed; says why, and which checkpoint there is.
        """
        self.poll(wait=True)
        if self._error is not None:
            before = [step for step in saved_steps(self.run_dir) if step <= self.step]
            left = f"keeps the one of step {before[-1]}" if before else "holds no other"
            # The error itself: what Ray hands on from a rank begins with the traceback there.
            reason = str(self._error).strip().splitlines()[-1]
            raise CheckpointError(
                say("not_saved", saver=self, left=left, reason=reason)
            ) from self._error

    def _give_up(self, error: OSError) -> None:
        logger.error(
            "no checkpoint of step %d in %s, the run goes on without: %s",
            self.step,
            self.run_dir,
            error,
        )
        self._error = error
        # The folder is removed when nobody writes to it any more.
        for group in self.parts.values():
            with suppress(OSError):
                group.checkpoint_written(wait=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._completion = None


def start_checkpoint(run_dir: Path, step: int) -> Path:
    """Makes a temporary folder to write into, which `complete_checkpoint` renames to `global_step_N`.

    Its name is used once: workers of a run that was killed may still be writing into theirs.
    """
    temporary = run_dir / f"global_step_{step}.{uuid.uuid4().hex[:8]}{TEMPORARY}"
    temporary.mkdir(parents=True)
    return temporary


def complete_checkpoint(temporary: Path) -> int:
    """Writes the manifest, forces the folder to disk, and gives it its name; returns the step.

    It takes the place of an older checkpoint of this step.
    """
    final = temporary.with_name(temporary.name.split(".")[0])
    give_name(temporary, final)
    step = int(final.name.removeprefix("global_step_"))
    write_atomically(final.with_name(LATEST), str(step))
    return step


def give_name(temporary: Path, final: Path) -> None:
    """Writes the manifest, forces the folder to disk, and renames it; what had the name goes."""
    files = {
        str(path.relative_to(temporary)): _fingerprint(path)
        for path in temporary.rglob("*")
        if path.is_file()
    }
    (temporary / MANIFEST).write_text(json.dumps(files))
    force_to_disk(temporary)
    remove_checkpoint(final)
    temporary.rename(final)


def damage(folder: Path, needs: Sequence[str] = ()) -> str | None:
    """Says what is wrong with a checkpoint's files, or returns None where nothing is.

    Args:
        needs: the workers' folders of which the manifest must list files.
    """
    try:
        files = json.loads((folder / MANIFEST).read_text())
        changed = [
            name for name, written in files.items() if _fingerprint(folder / name) != written
        ]
    # The manifest, or a file of it, is gone, or it is no table of files.
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    # The driver's state is a file of no folder, and stands for itself.
    folders = {name.split("/")[0] for name in files}
    if missing := [name for name in (DRIVER_STATE, *needs) if name not in folders]:
        return f"{MANIFEST} lists no {', '.join(missing)}"
    return f"{changed[0]} has changed since it was written" if changed else None


def _fingerprint(path: Path) -> list[int]:
    """Returns [bytes, CRC-32]: enough against accidents; reading a checkpoint runs no code, so none need be trusted."""
    with path.open("rb") as file:
        blocks = iter(partial(file.read, 1 << 22), b"")
        return [
            path.stat().st_size,
            reduce(lambda checksum, block: zlib.crc32(block, checksum), blocks, 0),
        ]


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint under a temporary name, so that a removal cut short never leaves half of one to be found."""
    if folder.exists():
        shutil.rmtree(
            folder.rename(folder.with_name(f"{folder.name}.old{TEMPORARY}")), ignore_errors=True
        )


def saved_steps(run_dir: Path, needs: Sequence[str] = ()) -> list[int]:
    """Lists the steps with a complete checkpoint that holds the folders in `needs`, ascending."""
    found = (
        (path, re.fullmatch(r"global_step_(\d+)", path.name))
        for path in run_dir.glob("global_step_*")
    )
    return sorted(
        int(match[1])
        for path, match in found
        if match and all((path / name).exists() for name in needs)
    )


def set_aside(run_dir: Path) -> None:
    """Takes another run's checkpoints out of the way of one that begins: global_step_N becomes global_step_N.old."""
    (run_dir / LATEST).unlink(missing_ok=True)
    for step in saved_steps(run_dir):
        folder = run_dir / f"global_step_{step}"
        shutil.rmtree(f"{folder}.old", ignore_errors=True)
        folder.rename(f"{folder}.old")
        logger.warning("%s is of another run: it is %s.old now", folder, folder.name)


def find_checkpoint(
    run_dir: Path, resume_mode: str, resume_from_path: str | None, needs: Sequence[str] = ()
) -> Path | None:
    """Finds the folder to resume from, None to start afresh; `needs` names the workers' folders that it must hold.

    With `auto` that is the one saved last, which LATEST names: RUN_DIR may hold later steps of another, abandoned run.

    Raises:
        FileNotFoundError: there is none with all that is needed, though there are checkpoints, or `resume_path` names
            none.
        ValueError: the one that `resume_path` names is damaged.
    """
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        path = Path(str(resume_from_path))
        if missing := [name for name in (DRIVER_STATE, *needs) if not (path / name).exists()]:
            raise FileNotFoundError(say("path_incomplete", path=path, missing=", ".join(missing)))
        if problem := damage(path, needs):
            raise ValueError(f"trainer.resume_from_path={path} is damaged: {problem}")
        return path
    latest = math.inf
    with suppress(FileNotFoundError, ValueError):
        latest = int((run_dir / LATEST).read_text())
    steps = [step for step in saved_steps(run_dir, needs) if step <= latest]
    if not steps and saved_steps(run_dir):
        raise FileNotFoundError(say("none_complete", run_dir=run_dir, needs=", ".join(needs)))
    for step in reversed(steps):
        folder = run_dir / f"global_step_{step}"
        if (problem := damage(folder, needs)) is None:
            return folder
        logger.error("%s is damaged (%s) and left out; the one before it is taken", folder, problem)
    if steps:
        raise FileNotFoundError(
            f"every checkpoint in {run_dir} is damaged; trainer.resume_mode=disable starts anew"
        )
    return None


def save_driver_state(folder: Path, state: dict[str, Any]) -> None:
    """Writes `data.pt`: tensors, numbers, strings, and lists and dicts of them."""
    # On a full disk torch would raise RuntimeError.
    buffer = io.BytesIO()
    torch.save(state, buffer)
    (folder / DRIVER_STATE).write_bytes(buffer.getvalue())


def load_driver_state(folder: Path) -> dict[str, Any]:
    """Reads `data.pt` without running code from it."""
    return torch.load(folder / DRIVER_STATE, weights_only=True)


def prune(run_dir: Path, step: int, *, keep_actor: int | None, keep_critic: int | None) -> None:
    """Removes what is older than the newest `keep_*` checkpoints up to `step`, and leftovers of broken-off saves.

    A checkpoint without its actor cannot be resumed, so it goes whole; without its critic it stays as the actor's.
    Later steps, of a run that was here before, stay.
    """
    for leftover in run_dir.glob(f"global_step_*{TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = [saved for saved in saved_steps(run_dir) if saved <= step]
    for part, keep in {"": keep_actor, "critic": keep_critic}.items():
        for old in steps[:-keep] if keep else ():
            remove_checkpoint(run_dir / f"global_step_{old}" / part)
