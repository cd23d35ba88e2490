"""How a checkpoint's folder gets its name, and loses it.

    global_step_N.HEX.incomplete            is written; whole once it has its manifest
    global_step_N                           a checkpoint
    global_step_N.HEX.replaced.incomplete   was that, and makes way for another of its step
    global_step_N.HEX.removed.incomplete    is on its way out

    save:  write -> manifest -> LATEST.tmp -> the old one makes way -> rename -> LATEST -> remove

Invariant: whenever a run is killed, `finish_naming` finds a whole checkpoint under one of the first
three names, and gives it the second.
"""

import logging
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from training.config.plain_files import read_plain_text
from training.run.checkpoint_contents import LATEST, SAVED_STEPS
from training.run.checkpoint_manifest import damage, write_manifest
from training.run.files import force_to_disk, open_in_folder, temporary_beside

logger = logging.getLogger(__name__)

TEMPORARY = ".incomplete"
REPLACED = ".replaced" + TEMPORARY
REMOVED = ".removed" + TEMPORARY
UNIQUE = "[0-9a-f]{8}"
# The most digits of a step's number.
MOST_DIGITS = 18


def folder_of_step(run_dir: Path, step: int) -> Path:
    """Returns the folder of a step's checkpoint."""
    return run_dir / f"global_step_{step}"


def step_of(folder: Path) -> int:
    """Returns the step of a checkpoint's folder, whichever of its names it has."""
    return int(folder.name.split(".")[0].removeprefix("global_step_"))


def start_checkpoint(run_dir: Path, step: int) -> Path:
    """Makes a temporary folder, which `complete_checkpoint` renames to `global_step_N`."""
    return make_temporary(folder_of_step(run_dir, step))


def make_temporary(folder: Path) -> Path:
    """Makes a temporary folder beside `folder`, in whose place it will be put."""
    temporary = _name_once(folder, TEMPORARY)
    temporary.mkdir(parents=True)
    return temporary


def complete_checkpoint(temporary: Path) -> int:
    """Writes the manifest, forces the folder to disk, and gives it its name; returns the step.

    It takes the place of an older checkpoint of this step.
    """
    write_manifest(temporary)
    step = step_of(temporary)
    latest = temporary.with_name(LATEST)
    # A process that is killed before it writes LATEST leaves this file, which says what it meant.
    intended = temporary_beside(latest, str(step))
    try:
        replaced = _exchange(temporary, folder_of_step(temporary.parent, step))
        intended.replace(latest)
    except OSError:
        intended.unlink(missing_ok=True)
        raise
    _note_save(temporary.parent, step)
    force_to_disk(temporary.parent, below=False)
    _remove(replaced)
    return step


def _note_save(run_dir: Path, step: int) -> None:
    """Writes down that a step was saved, so that a run whose checkpoints are gone is known."""
    # The checkpoint is there all the same.
    with suppress(OSError), open_in_folder(run_dir / SAVED_STEPS, "ab") as file:
        file.write(f"{step}\n".encode())


def give_name(temporary: Path, final: Path) -> None:
    """Writes the manifest, forces the folder to disk, and renames it; what had the name goes."""
    write_manifest(temporary)
    replaced = _exchange(temporary, final)
    force_to_disk(final.parent, below=False)
    _remove(replaced)


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint, so that a removal cut short never leaves half of one to be found."""
    if folder.exists():
        _remove(folder.rename(_name_once(folder, REMOVED)))


def _name_once(folder: Path, ending: str) -> Path:
    """Returns a name that is used once.

    Workers of a run that was killed may still be writing into theirs.
    """
    return folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{ending}")


def _exchange(whole: Path, final: Path) -> Path | None:
    """Puts a whole checkpoint in the place of another; returns that under its new name, if any."""
    replaced = None
    if final.exists():
        replaced = final.rename(_name_once(final, REPLACED))
    try:
        whole.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    return replaced


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


# After a kill


def finish_naming(run_dir: Path, *, go_on: bool) -> None:
    """Gives whole checkpoints their names, where a run was killed before it did.

    Args:
        go_on: make LATEST name what was saved last, too.
    """
    unnamed = run_dir.glob(f"global_step_*{TEMPORARY}")
    names = {path.name.split(".")[0] for path in unnamed}
    folders = [run_dir / name for name in names if re.fullmatch(r"global_step_\d+", name)]
    taken = [folder for folder in folders if finish_name(folder)]
    latest = run_dir / LATEST
    intended = latest.with_name(f"{LATEST}.tmp")
    if not go_on or not (taken or intended.exists()):
        return
    step = _read_step(intended)
    if taken:
        step = max(step_of(folder) for folder in taken)
    if step is None or damage(folder_of_step(run_dir, step)) is not None:
        intended.unlink(missing_ok=True)
        return
    temporary_beside(latest, str(step)).replace(latest)


def finish_name(final: Path) -> bool:
    """Gives `final` its name where a kill came before that.

    Returns True where it is the last save that had none, and not one which that was to replace.
    """
    saved = _whole(final, TEMPORARY)
    if saved:
        logger.warning("%s was saved whole, but not yet named so: it is now", final)
        _remove(_exchange(saved[-1], final))
        return True
    replaced = _whole(final, REPLACED)
    if replaced and not final.exists():
        logger.warning("%s was to be replaced, but was not: it is back", final)
        _exchange(replaced[-1], final)
    return False


def _whole(final: Path, ending: str) -> list[Path]:
    """Lists the whole checkpoints that were, or were to be, `final`; the newest last."""
    form = re.compile(rf"{re.escape(final.name)}\.{UNIQUE}{re.escape(ending)}")
    folders = [path for path in final.parent.iterdir() if form.fullmatch(path.name)]
    return sorted(
        (folder for folder in folders if damage(folder) is None),
        key=lambda folder: folder.stat().st_mtime_ns,
    )


def _read_step(file: Path) -> int | None:
    """Reads a step's number; None where there is none."""
    if not file.exists():
        return None
    return step_in(read_plain_text(file, errors="replace"))


def step_in(text: str) -> int | None:
    """Returns the step that a text names; None where it is no number, or none that a step has."""
    text = text.strip()
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        return None
    return int(text)
