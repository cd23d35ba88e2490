"""Checkpoint folders: how they get their names, are found again, checked and pruned.

Invariant: a folder with the name `global_step_N` is always whole, because a checkpoint is written
under a temporary name, forced to disk and renamed; older ones go only when a newer one is complete.
With several nodes the run's folder is one that all of them see. `checkpoint_contents.py` lists what
a folder holds.
"""

import json
import logging
import math
import re
import shutil
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from training.run.checkpoint_contents import CRITIC, DRIVER_STATE, LATEST, MANIFEST
from training.run.files import force_to_disk, write_atomically

logger = logging.getLogger(__name__)

TEMPORARY = ".incomplete"
# Bytes of a file that are read at once for its checksum.
BLOCK = 1 << 22


def folder_of_step(run_dir: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint."""
    return run_dir / f"global_step_{step}"


# Writing


def start_checkpoint(run_dir: Path, step: int) -> Path:
    """Makes a temporary folder, which `complete_checkpoint` renames to `global_step_N`."""
    return make_temporary(folder_of_step(run_dir, step))


def make_temporary(folder: Path) -> Path:
    """Makes a temporary folder beside `folder`, in whose place it will be put.

    Its name is used once: workers of a run that was killed may still be writing into theirs.
    """
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
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


def _fingerprint(path: Path) -> list[int]:
    """Returns [bytes, CRC-32]: enough against accidents.

    Reading a checkpoint runs no code, so none need be trusted.
    """
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            checksum = zlib.crc32(block, checksum)
    return [path.stat().st_size, checksum]


# Finding and checking


def damage(folder: Path, needs: Sequence[str] = ()) -> str | None:
    """Returns what is wrong with a checkpoint's files, None where nothing is.

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
    listed = {name.split("/")[0] for name in files}
    missing = [name for name in (DRIVER_STATE, *needs) if name not in listed]
    if missing:
        return f"{MANIFEST} lists no {', '.join(missing)}"
    if changed:
        return f"{changed[0]} has changed since it was written"
    return None


def saved_steps(run_dir: Path, needs: Sequence[str] = ()) -> list[int]:
    """Lists the steps with a complete checkpoint that holds the folders in `needs`, ascending."""
    steps = []
    for path in run_dir.glob("global_step_*"):
        name = re.fullmatch(r"global_step_(\d+)", path.name)
        if name is not None and all((path / folder).exists() for folder in needs):
            steps.append(int(name[1]))
    return sorted(steps)


def find_checkpoint(
    run_dir: Path,
    resume_mode: str,
    resume_from_path: str | None,
    needs: Sequence[str] = (),
    *,
    folder: Path | None = None,
) -> Path | None:
    """Finds the folder to resume from; None to start afresh.

    Args:
        resume_mode, resume_from_path: settings of `trainer`.
        needs: the workers' folders that it must hold.
        folder: the one to resume from, whatever the settings say.
    Raises:
        FileNotFoundError: there is none with all that is needed, though there are checkpoints, or
            `resume_path` names none.
        ValueError: the one that `resume_path` names is damaged.
    """
    if folder is not None:
        return _named_checkpoint(folder, needs)
    if resume_mode == "disable":
        return None
    if resume_mode == "resume_path":
        return _named_checkpoint(Path(str(resume_from_path)), needs)
    return _latest_checkpoint(run_dir, needs)


def _named_checkpoint(path: Path, needs: Sequence[str]) -> Path:
    """Returns the checkpoint that `trainer.resume_from_path` names, once it is checked."""
    missing = [name for name in (DRIVER_STATE, *needs) if not (path / name).exists()]
    if missing:
        raise FileNotFoundError(
            f"trainer.resume_from_path={path} holds no {', '.join(missing)}; name a complete "
            "global_step_N folder, or have what is missing start anew with "
            "trainer.resume_with_changes=true"
        )
    problem = damage(path, needs)
    if problem is not None:
        raise ValueError(f"trainer.resume_from_path={path} is damaged: {problem}")
    return path


def _latest_checkpoint(run_dir: Path, needs: Sequence[str]) -> Path | None:
    """Finds the newest sound checkpoint, at most as late as LATEST says.

    The folder may hold later steps of another, abandoned run.
    """
    latest = math.inf
    with suppress(FileNotFoundError, ValueError):
        latest = int((run_dir / LATEST).read_text())
    steps = [step for step in saved_steps(run_dir, needs) if step <= latest]
    if not steps and saved_steps(run_dir):
        raise FileNotFoundError(
            f"{run_dir} has checkpoints, but none with {', '.join(needs)} as this run needs; "
            "trainer.resume_with_changes=true starts what is missing anew, "
            "trainer.resume_mode=disable the whole run; or take another trainer.default_local_dir"
        )
    for step in reversed(steps):
        folder = folder_of_step(run_dir, step)
        problem = damage(folder, needs)
        if problem is None:
            return folder
        logger.error("%s is damaged (%s) and left out; the one before it is taken", folder, problem)
    if steps:
        raise FileNotFoundError(
            f"every checkpoint in {run_dir} is damaged; trainer.resume_mode=disable starts anew"
        )
    return None


# Removing


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint, so that a removal cut short never leaves half of one to be found."""
    if folder.exists():
        doomed = folder.rename(folder.with_name(f"{folder.name}.old{TEMPORARY}"))
        shutil.rmtree(doomed, ignore_errors=True)


def set_aside(run_dir: Path) -> None:
    """Renames another run's checkpoints to global_step_N.old, out of the way of one that begins."""
    (run_dir / LATEST).unlink(missing_ok=True)
    for step in saved_steps(run_dir):
        folder = folder_of_step(run_dir, step)
        shutil.rmtree(f"{folder}.old", ignore_errors=True)
        folder.rename(f"{folder}.old")
        logger.warning("%s is of another run: it is %s.old now", folder, folder.name)


def prune(run_dir: Path, step: int, *, keep_actor: int | None, keep_critic: int | None) -> None:
    """Removes what is older than the newest `keep_*` checkpoints up to `step`.

    Leftovers of broken-off saves go, too.
    A checkpoint without its actor cannot be resumed, so it goes whole; without its critic it stays
    as the actor's. Later steps, of a run that was here before, stay.
    """
    for leftover in run_dir.glob(f"global_step_*{TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = [saved for saved in saved_steps(run_dir) if saved <= step]
    for old in _all_but_newest(steps, keep_actor):
        remove_checkpoint(folder_of_step(run_dir, old))
    for old in _all_but_newest(steps, keep_critic):
        remove_checkpoint(folder_of_step(run_dir, old) / CRITIC)


def _all_but_newest(steps: Sequence[int], keep: int | None) -> Sequence[int]:
    """Returns the steps without the last `keep`; none of them where all are kept."""
    return steps[:-keep] if keep else ()
