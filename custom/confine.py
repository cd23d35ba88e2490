"""Bounds a process that executes texts of the policy's, and sees to its end.

Invariant: nothing here imports more than the standard library, as a process is confined before it
loads anything.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Options of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Flags of its unshare.
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Limits:
    """Describes what a process may have.

    Attributes:
        network: it reaches other machines, and servers of this one.
        memory_gb: GiB of memory that it may take; None: any.
    """

    network: bool = True
    memory_gb: float | None = None


def confine(limits: Limits) -> None:
    """Limits this process, which must have one thread yet.

    Without the network it moves to a network namespace with nothing in it, where that is not
    forbidden.
    """
    if limits.memory_gb is not None:
        size = int(limits.memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
    if not limits.network and sys.platform == "linux":
        _leave_network()


def _leave_network() -> None:
    """Moves this process to an empty network namespace, where the system allows that."""
    libc = ctypes.CDLL(None)
    user_id = os.getuid()
    group_id = os.getgid()
    # Root needs no user namespace for it.
    if libc.unshare(CLONE_NEWNET) == 0:
        return
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return
    # The user stays the same, and the owner of the same files.
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user_id} {user_id} 1")
    Path("/proc/self/gid_map").write_text(f"{group_id} {group_id} 1")


def die_with_parent() -> None:
    """Makes Linux kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes Linux give this process the descendants whose parents end: they stay in its tree."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(pid: int) -> None:
    """Kills a process and its group with whatever it started, in whichever session that is."""
    import psutil

    with contextlib.suppress(psutil.Error):
        descendants = psutil.Process(pid).children(recursive=True)
        # Itself too: it may not lead its group yet.
        for process in [*descendants, psutil.Process(pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
    # macOS raises PermissionError for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Makes an empty folder for a process whose code nobody has read, and removes it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Removes a folder, if it is there, whatever a process has made in it.

    Folders may lie in folders without end, and some may be closed to their owner. Every process
    that writes there must have ended. What cannot be removed stays.
    """
    if not folder.is_dir():
        return
    outer = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    with contextlib.suppress(OSError):
        # What may not be written cannot be moved.
        folder.chmod(0o700)
        _empty(outer, folder.rename(outer / "folder"))
    shutil.rmtree(outer, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def _empty(outer: Path, folder: Path) -> None:
    """Removes a folder in `outer`, level by level: those in it become its neighbours first.

    So no path gets long, and nothing is called within itself.
    """
    waiting = [folder]
    num_moved = 0
    while waiting:
        current = waiting.pop()
        for path in map(Path, _entries(current)):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
                continue
            # What may not be written cannot be moved either.
            path.chmod(0o700)
            num_moved += 1
            moved = outer / str(num_moved)
            path.rename(moved)
            waiting.append(moved)
        current.rmdir()


def _entries(folder: Path) -> list[str]:
    """Lists the paths of what is in a folder, which its owner may have closed to itself."""
    folder.chmod(0o700)
    with os.scandir(folder) as entries:
        return [entry.path for entry in entries]
