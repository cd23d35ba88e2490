"""Keeps a run's folder for one process at a time."""

import fcntl
import json
import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.config.loader import ConfigError
from training.run.files import naming, open_in_folder

logger = logging.getLogger(__name__)
OWNER_FILE = "owner.json"
# The system's question about a lock: struct flock, with type, whence, start, length and process.
FLOCK = "hhqqi"
# Folders that this process holds. Opening and closing a file gives up all of the process's locks
# on it, so that such a folder must not be asked about.
_held_here: set[Path] = set()


def is_held(run_dir: Path) -> bool:
    """Checks whether a process holds the folder, and leaves its lock alone.

    Of a holder on another machine the file system has to tell. One that cannot be asked is not
    held, as far as is known.
    """
    if run_dir.resolve() in _held_here:
        return True
    question = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        with (run_dir / OWNER_FILE).open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, question)
    except OSError:
        return False
    return bool(struct.unpack(FLOCK, answer)[0] != fcntl.F_UNLCK)


def was_left(run_dir: Path) -> bool:
    """Checks whether a process took the folder and ended without giving it back.

    One that is at work is not told apart from that: ask behind its end.
    """
    try:
        return (run_dir / OWNER_FILE).stat().st_size > 0
    except OSError:
        return False


def _make_folder(run_dir: Path) -> None:
    """Makes the run's folder; raises ConfigError where it cannot be made."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    # ValueError: a name that no file can have.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = (
            f"trainer.default_local_dir={run_dir} cannot be made ({reason}): name another folder"
        )
        raise ConfigError([problem]) from error


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Locks the folder for this process.

    The system takes the lock from a holder that ends, however it does.

    Raises:
        ConfigError: another process holds it, of which it names process id and host; or it cannot
            be made.
    """
    _make_folder(run_dir)
    # Unbuffered: what has no room is not written again when the file is closed.
    with open_in_folder(run_dir / OWNER_FILE, "a+b") as file:
        file.seek(0)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            holder = file.read().decode(errors="replace") or "another process"
            problem = (
                f"trainer.default_local_dir={run_dir} is held by {holder}; end that run, or choose "
                "another folder"
            )
            raise ConfigError([problem]) from None
        except OSError as error:
            logger.warning(
                "%s cannot be locked, so nothing keeps a second run out: %s", run_dir, error
            )
        else:
            previous = file.read().decode(errors="replace")
            if previous:
                logger.warning(
                    "%s: the run of %s did not come to its end; its folder is taken over",
                    run_dir,
                    previous,
                )
        with naming(run_dir / OWNER_FILE):
            file.truncate(0)
            owner = {"pid": os.getpid(), "host": socket.gethostname()}
            file.write(json.dumps(owner).encode())
            # For other nodes of a shared file system, which look at it.
            os.fsync(file.fileno())
        _held_here.add(run_dir.resolve())
        try:
            yield
        finally:
            _held_here.discard(run_dir.resolve())
            file.truncate(0)
