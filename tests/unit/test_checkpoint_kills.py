"""Kills and errors in the midst of giving a checkpoint its name: one is always found after them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from training.run import checkpoint_contents, checkpoint_folders, checkpoint_manifest
from training.run.checkpoint_contents import LATEST, MANIFEST, SAVED_STEPS, DriverState
from training.run.checkpoint_folders import CannotResume, find_checkpoint, prune, set_aside
from training.run.checkpoint_names import complete_checkpoint, give_name, start_checkpoint

OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync", "open", "write")
MORE_THAN_ALL = 1000


def begin(run_dir: Path, step: int, text: str) -> Path:
    folder = start_checkpoint(run_dir, step)
    for part in ("actor", "critic"):
        (folder / part).mkdir()
        (folder / part / "weights").write_text(text)
    checkpoint_contents.save_driver_state(folder, DriverState(global_steps=step))
    return folder


def save(run_dir: Path, step: int, text: str) -> None:
    complete_checkpoint(begin(run_dir, step, text))


@contextmanager
def stopped_at(number: int, stop: Callable[[], None]) -> Iterator[list[str]]:
    """Calls `stop` before the operation of that number on files; lists those that were tried."""
    done: list[str] = []
    before = {name: getattr(os, name) for name in OPERATIONS if name != "write"}
    write_text = Path.write_text

    def count(name: str) -> None:
        done.append(name)
        if len(done) == number + 1:
            stop()

    def counted(name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            count(name)
            return before[name](*args, **kwargs)

        return operation

    def written(path: Path, text: str) -> int:
        count("write")
        write_text(path, text[: len(text) // 2])
        count("write the rest")
        return write_text(path, text)

    for name in before:
        setattr(os, name, counted(name))
    Path.write_text = written  # type: ignore[method-assign, assignment]
    try:
        yield done
    finally:
        for name, operation in before.items():
            setattr(os, name, operation)
        Path.write_text = write_text  # type: ignore[method-assign]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(errno.EIO, "Input/output error")


def killed_at(number: int, action: Callable[[], None]) -> bool:
    """Runs the action in a process that is killed at that operation; False: it had ended before."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        with stopped_at(number, kill):
            action()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def failed_at(number: int, action: Callable[[], None]) -> bool:
    """Runs the action, whose operation of that number fails; False: it has no so many."""
    with stopped_at(number, fail) as done, suppress(OSError):
        action()
    return len(done) > number


def replace_it(run_dir: Path) -> Callable[[], None]:
    folder = begin(run_dir, 3, "new")
    return lambda: complete_checkpoint(folder)  # type: ignore[return-value]


def next_step(run_dir: Path) -> Callable[[], None]:
    folder = begin(run_dir, 4, "new")

    def action() -> None:
        prune(run_dir, complete_checkpoint(folder), keep_actor=1, keep_critic=1)

    return action


def prune_a_critic(run_dir: Path) -> Callable[[], None]:
    save(run_dir, 4, "new")
    return lambda: prune(run_dir, 4, keep_actor=2, keep_critic=1)


@pytest.mark.seconds
@pytest.mark.parametrize("stopped", [killed_at, failed_at])
@pytest.mark.parametrize("prepare", [replace_it, next_step, prune_a_critic])
def test_wherever_a_save_is_stopped_a_whole_checkpoint_is_found(
    tmp_path: Path, prepare: Callable[..., Callable[[], None]], stopped: Callable[..., bool]
) -> None:
    found_new = []
    for number in range(MORE_THAN_ALL):
        run_dir = tmp_path / str(number)
        save(run_dir, 3, "old")
        was_stopped = stopped(number, prepare(run_dir))
        found = find_checkpoint(run_dir, "auto", None, ("actor", "critic"))
        assert found is not None and found.name in ("global_step_3", "global_step_4"), number
        text = (found / "actor/weights").read_text()
        assert (found / "critic/weights").read_text() == text
        assert (run_dir / LATEST).read_text() == found.name.removeprefix("global_step_")
        found_new.append(text == "new")
        # What the actor alone needs is sound, too.
        assert find_checkpoint(run_dir, "auto", None, ("actor",)) == found
        save(run_dir, 5, "later")
        prune(run_dir, 5, keep_actor=1, keep_critic=1)
        left = {path.name for path in run_dir.iterdir()}
        assert left == {"global_step_5", LATEST, SAVED_STEPS}
        if not was_stopped:
            break
    assert number > 5
    if stopped is killed_at:
        first_new = found_new.index(True)
        assert all(found_new[first_new:]), "what has its manifest is never lost again"


@pytest.mark.seconds
def test_a_first_save_that_is_whole_is_found_though_its_run_was_killed(tmp_path: Path) -> None:
    for number in range(MORE_THAN_ALL):
        run_dir = tmp_path / str(number)
        folder = begin(run_dir, 7, "new")
        was_stopped = killed_at(number, lambda folder=folder: complete_checkpoint(folder))
        whole = any(run_dir.glob(f"*/{MANIFEST}"))
        found = find_checkpoint(run_dir, "auto", None, ("actor",))
        assert found == (run_dir / "global_step_7" if whole else None)
        if not was_stopped:
            break


@pytest.mark.seconds
def test_a_folder_of_any_name_is_found_again_by_that_name(tmp_path: Path) -> None:
    for number in range(MORE_THAN_ALL):
        final = tmp_path / str(number) / "best"
        give_name(begin(final.parent, 3, "old"), final)
        folder = begin(final.parent, 3, "new").rename(final.parent / "best.0123abcd.incomplete")
        was_stopped = killed_at(number, lambda f=folder, to=final: give_name(f, to))
        found = find_checkpoint(tmp_path / "none", "resume_path", str(final), ("actor",))
        assert found == final and (final / "actor/weights").read_text() in ("old", "new")
        if not was_stopped:
            break
    assert number > 5


def test_who_names_another_checkpoint_finds_later_what_was_whole_without_a_name(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2, "old")
    unnamed = begin(tmp_path, 4, "new")
    checkpoint_manifest.write_manifest(unnamed)
    named = find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_2"), ("actor",))
    assert named == tmp_path / "global_step_2"
    assert checkpoint_folders.saved_steps(tmp_path) == [2, 4]
    assert (tmp_path / LATEST).read_text() == "2", "the run goes on from there"


def test_leftovers_that_are_not_whole_are_left_out(tmp_path: Path) -> None:
    save(tmp_path, 2, "old")
    begin(tmp_path, 4, "no manifest")
    damaged = begin(tmp_path, 5, "damaged")
    checkpoint_manifest.write_manifest(damaged)
    (damaged / "actor/weights").write_text("cut")
    (tmp_path / f"{LATEST}.tmp").write_text("5")
    assert find_checkpoint(tmp_path, "auto", None, ("actor",)) == tmp_path / "global_step_2"
    assert (tmp_path / LATEST).read_text() == "2"
    assert checkpoint_folders.saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("earlier", [True, False])
def test_a_latest_that_points_at_nothing_is_refused(tmp_path: Path, earlier: bool) -> None:
    if earlier:
        save(tmp_path, 3, "old")
    (tmp_path / LATEST).write_text("8")
    with pytest.raises(CannotResume) as refusal:
        find_checkpoint(tmp_path, "auto", None, ("actor",))
    said = str(refusal.value)
    assert f"{tmp_path / LATEST} names step 8, and {tmp_path}/global_step_8 is not there" in said
    assert "trainer.resume_mode=disable starts anew" in said
    assert (f"trainer.resume_from_path={tmp_path}/global_step_3" in said) == earlier
    assert find_checkpoint(tmp_path, "disable", None) is None


@pytest.mark.parametrize("text", ["", "\0\0", "seven", "²", "9" * 5000])
def test_a_latest_that_names_no_step_leaves_the_newest(tmp_path: Path, caplog, text: str) -> None:
    save(tmp_path, 3, "old")
    (tmp_path / LATEST).write_text(text)
    assert find_checkpoint(tmp_path, "auto", None, ("actor",)) == tmp_path / "global_step_3"
    assert f"{LATEST} names no step" in caplog.text


@pytest.mark.parametrize("text", ["", None])
def test_without_a_latest_the_last_save_is_taken_not_a_step_of_an_abandoned_run(
    tmp_path: Path, caplog, text: str | None
) -> None:
    for step in (3, 8, 4):
        save(tmp_path, step, str(step))
    (tmp_path / LATEST).unlink()
    if text is not None:
        (tmp_path / LATEST).write_text(text)
    assert find_checkpoint(tmp_path, "auto", None, ("actor",)) == tmp_path / "global_step_4"
    assert f"the last one in {SAVED_STEPS}, 4, is taken" in caplog.text
    (tmp_path / SAVED_STEPS).unlink()
    assert find_checkpoint(tmp_path, "auto", None, ("actor",)) == tmp_path / "global_step_8"


def test_a_newer_checkpoint_that_lost_a_folder_is_left_out_with_a_word(
    tmp_path: Path, caplog
) -> None:
    for step in (3, 4):
        save(tmp_path, step, str(step))
    shutil.rmtree(tmp_path / "global_step_4/critic")
    found = find_checkpoint(tmp_path, "auto", None, ("actor", "critic"))
    assert found == tmp_path / "global_step_3"
    assert f"{tmp_path}/global_step_4 is damaged" in caplog.text


def test_a_single_save_whose_checkpoint_is_gone_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 3, "old")
    shutil.rmtree(tmp_path / "global_step_3")
    (tmp_path / LATEST).unlink()
    with pytest.raises(CannotResume, match=r"saved_steps\.txt tells of saving steps 3 to 3"):
        find_checkpoint(tmp_path, "auto", None, ("actor",))
    set_aside(tmp_path)
    assert find_checkpoint(tmp_path, "auto", None, ("actor",)) is None


def test_a_run_that_was_killed_before_its_first_save_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    start_checkpoint(tmp_path, 3)
    assert find_checkpoint(tmp_path, "auto", None, ("actor",)) is None


def test_a_checkpoint_whose_critic_was_pruned_is_sound_for_its_actor(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, str(step))
    prune(tmp_path, 2, keep_actor=2, keep_critic=1)
    assert checkpoint_manifest.damage(tmp_path / "global_step_1", ("actor",)) is None
    named = find_checkpoint(tmp_path, "resume_path", str(tmp_path / "global_step_1"), ("actor",))
    assert named == tmp_path / "global_step_1"


def test_pruning_beside_a_damaged_manifest_goes_on(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, str(step))
    (tmp_path / "global_step_2" / MANIFEST).write_text("[")
    prune(tmp_path, 3, keep_actor=3, keep_critic=1)
    assert checkpoint_folders.saved_steps(tmp_path, ("critic",)) == [3]
