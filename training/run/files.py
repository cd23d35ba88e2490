"""Writes files so that a kill or a crash leaves the old file or the new one, never a part."""

import fcntl
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

# Seconds.
YOUNG_S = 5.0


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name, forces it to disk, and renames it."""
    temporary_beside(path, text).replace(path)


def temporary_beside(path: Path, text: str) -> Path:
    """Writes what a file is to hold to FILE.tmp, forces it to disk, and returns that."""
    temporary = path.with_name(path.name + ".tmp")
    with naming(path):
        # A link that stands there would lead the text elsewhere.
        temporary.unlink(missing_ok=True)
        temporary.write_text(text)
        force_to_disk(temporary)
    return temporary


def append_line(path: Path, line: str) -> None:
    """Appends a line to a file, on the disk when it returns; one without room leaves nothing.

    A line that was broken off before, by a kill, is ended first.
    """
    with naming(path), open_in_folder(path, "a+b") as file:
        before = file.seek(0, os.SEEK_END)
        rest = (line + "\n").encode()
        if before > 0:
            file.seek(before - 1)
            if file.read(1) != b"\n":
                rest = b"\n" + rest
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def open_in_folder(path: Path, mode: str) -> IO[bytes]:
    """Opens a file of a run's folder, unbuffered, to be written; made where it is not there.

    Raises:
        OSError: a link stands there, which would lead elsewhere; or it cannot be written.
    """
    return open(path, mode, buffering=0, opener=_without_links)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def force_to_disk(written: Path, *, below: bool = True) -> None:
    """Calls fsync on a file, or a folder and all below it, so that a rename cannot overtake it.

    Args:
        below: with a folder, whatever lies in it, too; otherwise its names alone.
    """
    paths = [written, *written.rglob("*")] if below else [written]
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def folder_in_the_making(final: Path, ending: str) -> Iterator[Path]:
    """Gives a new folder beside `final`, which the block renames to it once it is whole.

    One that is not renamed is removed, as are those that processes left that were killed: each
    locks its own for as long as it lives.

    Args:
        ending: of the folder's name, FINAL.xxxxxxxx and this.
    """
    _remove_left_behind(final, ending)
    temporary = final.with_name(f"{final.name}.{uuid.uuid4().hex[:8]}{ending}")
    temporary.mkdir(parents=True)
    handle = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Some file systems have no locks.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(handle)


def _remove_left_behind(final: Path, ending: str) -> None:
    """Removes folders in the making that nobody makes any more; what cannot be removed stays."""
    name = re.compile(re.escape(final.name) + r"\.[0-9a-f]{8}" + re.escape(ending))
    found = list(final.parent.iterdir()) if final.parent.is_dir() else []
    for folder in found:
        if name.fullmatch(folder.name) is None or folder.is_symlink():
            continue
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # One that was made just now may not be locked yet.
                if time.time() - folder.stat().st_mtime > YOUNG_S:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def from_here(path: Path) -> str:
    """Returns a path as a command that is given here may name it: short where it lies below."""
    absolute = path.absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Names the file in an error of the block that names none, as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
