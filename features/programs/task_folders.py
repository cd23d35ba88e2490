"""The folders in which programs work: one for each attempt at an episode, emptied behind it.

A program starts there and is told so by TASK_DIR. What its command names beside the trainer is
named absolutely first, and START_DIR says where the trainer itself was started. Invariant: a folder
lives until the reward function has seen it; those of a killed trainer go when the next one starts.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from custom.confine import remove_folder

PREFIX = "programs-"
# Whoever runs holds a lock of it.
LOCK = "in_use"


class TaskFolders:
    """Makes folders, all within one of this process."""

    def __init__(self) -> None:
        remove_left_over()
        self._root = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        # It has its name once it is locked: whoever finds it finds it held.
        self._lock = os.open(self._root / "new", os.O_WRONLY | os.O_CREAT)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self._root / "new", self._root / LOCK)

    def make(self) -> str:
        """Makes an empty folder; returns its path."""
        return tempfile.mkdtemp(prefix="task-", dir=self._root)

    def close(self) -> None:
        """Removes all that is left."""
        remove_folder(self._root)
        os.close(self._lock)


def remove_left_over() -> None:
    """Removes the folders of trainers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(folder)


def with_whole_paths(command: Sequence[str]) -> list[str]:
    """Names absolutely what a command's words name beside the trainer: files, and paths with `/`.

    A program starts in a folder of its own, where these words would name nothing.
    """
    words = list(command[:1])
    if words and "/" in words[0] and os.path.exists(words[0]):
        words[0] = os.path.abspath(words[0])
    for word in command[1:]:
        is_path = os.path.isfile(word) or ("/" in word and os.path.exists(word))
        words.append(os.path.abspath(word) if is_path else word)
    return words


def python_path(command: Sequence[str], given: str) -> str:
    """Returns where a program's Python finds modules, absolutely.

    Args:
        given: PYTHONPATH as it would be. `python -m NAME` finds modules where the trainer was
            started, too.
    """
    return os.pathsep.join(dict.fromkeys(_python_folders(command, given)))


def _python_folders(command: Sequence[str], given: str) -> Iterator[str]:
    if "-m" in command or "-c" in command:
        yield os.getcwd()
    if given:
        # An empty one is the trainer's folder to Python.
        yield from (os.path.abspath(folder) for folder in given.split(os.pathsep))
