"""Checkpoint folders: how they are found again, checked and pruned.

Invariant: a folder with the name `global_step_N` is always whole, because a checkpoint is written
under a temporary name (`checkpoint_names.py`); older ones go only when a newer one is complete, and
a run whose checkpoints are gone is not begun anew without a word. With several nodes the run's
folder is one that all of them see. `checkpoint_contents.py` lists what a folder holds.
"""

import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from training.config.plain_files import read_plain_text
from training.run.checkpoint_contents import (
    ACTOR,
    CRITIC,
    DRIVER_STATE,
    LATEST,
    SAVED_STEPS,
    load_driver_state,
)
from training.run.checkpoint_manifest import damage, parts_left_out, take_from_manifest
from training.run.checkpoint_names import (
    TEMPORARY,
    finish_name,
    finish_naming,
    folder_of_step,
    remove_checkpoint,
    step_in,
    step_of,
)

logger = logging.getLogger(__name__)


class CannotResume(FileNotFoundError, ValueError):
    """Reports that a run cannot go on as it is told to: what is there, and the fix."""


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
        CannotResume: there is none with all that is needed, though there are checkpoints or were;
            or the one that `resume_path` names is none, or damaged; or it has another step's name.
    What a kill left whole without its name gets it first.
    """
    named = folder
    if named is None and resume_mode == "resume_path":
        named = Path(str(resume_from_path))
    finish_naming(run_dir, go_on=named is None and resume_mode == "auto")
    if named is not None:
        return _named_checkpoint(named, needs)
    if resume_mode == "disable":
        return None
    return _latest_checkpoint(run_dir, needs)


def _named_checkpoint(path: Path, needs: Sequence[str]) -> Path:
    """Returns the checkpoint that `trainer.resume_from_path` names, once it is checked."""
    if path.parent.is_dir():
        finish_name(path)
    missing = [name for name in (DRIVER_STATE, *needs) if not (path / name).exists()]
    if missing:
        raise CannotResume(
            f"trainer.resume_from_path={path} holds no {', '.join(missing)}; name a complete "
            "global_step_N folder, or have what is missing start anew with "
            "trainer.resume_with_changes=true"
        )
    problem = damage(path, needs)
    if problem is not None:
        raise CannotResume(f"trainer.resume_from_path={path} is damaged: {problem}")
    _require_own_name(path)
    return path


def _require_own_name(folder: Path) -> None:
    """Raises CannotResume where a folder has another step's name, or its state cannot be read."""
    name = re.fullmatch(r"global_step_(\d+)", folder.name)
    try:
        step = load_driver_state(folder).global_steps
    except ValueError as error:
        raise CannotResume(
            f"{error}; an earlier checkpoint may be named by trainer.resume_mode=resume_path with "
            "trainer.resume_from_path; trainer.resume_mode=disable starts anew"
        ) from error
    if name is not None and int(name[1]) != step:
        raise CannotResume(
            f"{folder} holds the checkpoint of step {step}, as its {DRIVER_STATE} says: call the "
            f"folder global_step_{step} again, and have {LATEST} beside it name that step"
        )


def _latest_checkpoint(run_dir: Path, needs: Sequence[str]) -> Path | None:
    """Finds the newest sound checkpoint, at most as late as LATEST says.

    The folder may hold later steps of another, abandoned run.
    """
    steps = _steps_of_this_run(run_dir)
    if not steps:
        _require_that_none_was_saved(run_dir)
        return None
    fitting = [step for step in saved_steps(run_dir, needs) if step in steps]
    if not fitting:
        raise CannotResume(
            f"{run_dir} has checkpoints, but none with {', '.join(needs)} as this run needs; "
            "trainer.resume_with_changes=true starts what is missing anew, "
            "trainer.resume_mode=disable the whole run; or take another trainer.default_local_dir"
        )
    for step in reversed(steps):
        folder = folder_of_step(run_dir, step)
        # Without the actor it is none.
        left_out = parts_left_out(folder, [name for name in needs if name != ACTOR])
        problem = damage(folder, [name for name in needs if name not in left_out])
        if problem is None and left_out:
            raise CannotResume(_without_parts(folder, left_out, fitting))
        if problem is None:
            _require_own_name(folder)
            return folder
        logger.error("%s is damaged (%s) and left out; the one before it is taken", folder, problem)
    raise CannotResume(
        f"every checkpoint in {run_dir} is damaged; trainer.resume_mode=disable starts anew"
    )


def _without_parts(folder: Path, left_out: Sequence[str], fitting: Sequence[int]) -> str:
    """Says that the checkpoint to go on from lacks what this run needs, and the ways out."""
    earlier = [step for step in fitting if step < step_of(folder)]
    text = (
        f"{folder} holds no {', '.join(left_out)}, which this run needs: go on with the "
        "settings that it was saved with (algorithm.adv_estimator, for one), or have what is "
        "missing start anew with trainer.resume_with_changes=true"
    )
    if earlier:
        before = folder_of_step(folder.parent, earlier[-1])
        text += (
            "; trainer.resume_mode=resume_path with "
            f"trainer.resume_from_path={before} gives the steps behind it up"
        )
    return text


def _steps_of_this_run(run_dir: Path) -> list[int]:
    """Lists the steps of the checkpoints up to the one that LATEST names, which must be there."""
    steps = saved_steps(run_dir)
    file = run_dir / LATEST
    if not steps and not file.exists():
        return steps
    if not file.exists():
        return _up_to_the_last_save(run_dir, steps, f"{file} is not there")
    text = read_plain_text(file, errors="replace").strip()
    latest = step_in(text)
    if latest is None:
        return _up_to_the_last_save(run_dir, steps, f"{file} names no step ({text[:40]!r})")
    if latest not in steps:
        earlier = [step for step in steps if step < latest]
        go_on = "its folder is to be put back"
        if earlier:
            before = folder_of_step(run_dir, earlier[-1])
            go_on += (
                "; trainer.resume_mode=resume_path with "
                f"trainer.resume_from_path={before} goes on from that one"
            )
        raise CannotResume(
            f"{file} names step {latest}, and {folder_of_step(run_dir, latest)} is not there: "
            f"{go_on}; trainer.resume_mode=disable starts anew"
        )
    return [step for step in steps if step <= latest]


def _up_to_the_last_save(run_dir: Path, steps: list[int], problem: str) -> list[int]:
    """Lists the steps up to the one that was saved last, where LATEST does not say which it was.

    Later ones are of an abandoned run.
    """
    notes = run_dir / SAVED_STEPS
    saves = read_plain_text(notes, errors="replace").split() if notes.exists() else []
    last = step_in(saves[-1]) if saves else None
    if last not in steps:
        logger.warning("%s; the newest checkpoint is taken", problem)
        return steps
    logger.warning("%s; the last one in %s, %d, is taken", problem, SAVED_STEPS, last)
    return [step for step in steps if step <= last]


def _require_that_none_was_saved(run_dir: Path) -> None:
    """Raises CannotResume where the run has saved checkpoints, which are gone."""
    file = run_dir / SAVED_STEPS
    if not file.exists():
        return
    steps = read_plain_text(file, errors="replace").split()
    if steps:
        raise CannotResume(
            f"{file} tells of saving steps {steps[0]} to {steps[-1]}, and {run_dir} holds no "
            "checkpoint: put its global_step_N folders back; trainer.resume_mode=disable starts "
            "anew, and keeps the metrics as metrics.jsonl.old"
        )


# Removing


def set_aside(run_dir: Path) -> None:
    """Renames another run's checkpoints to global_step_N.old, out of the way of one that begins."""
    for name in (LATEST, f"{LATEST}.tmp", SAVED_STEPS):
        (run_dir / name).unlink(missing_ok=True)
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
        folder = folder_of_step(run_dir, old)
        if (folder / CRITIC).exists():
            take_from_manifest(folder, CRITIC)
            remove_checkpoint(folder / CRITIC)


def _all_but_newest(steps: Sequence[int], keep: int | None) -> Sequence[int]:
    """Returns the steps without the last `keep`; none of them where all are kept."""
    return steps[:-keep] if keep else ()
