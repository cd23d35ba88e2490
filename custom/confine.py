"""What a process may have that executes texts of the policy's: no network, bounded memory, no life of its own.

Invariant: nothing here imports more than the standard library, as a process is confined before it loads anything.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

# Of Linux's prctl, and of its unshare.
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


@dataclass(frozen=True)
class Limits:
    """Says what a process may have: the network, and so many GiB of memory (None: any)."""

    network: bool = True
    memory_gb: float | None = None


def confine(limits: Limits) -> None:
    """Limits this process, which must have one thread yet.

    Without the network it moves to a network namespace with nothing in it, where that is not forbidden.
    """
    if limits.memory_gb is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limits.memory_gb * 2**30),) * 2)
    if limits.network or sys.platform != "linux":
        return
    libc, uid, gid = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET) == 0 or libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return
    # The user stays who it is, and its files its own.
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)


def die_with_parent() -> None:
    """Has Linux kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Has Linux give this process the descendants whose parents end, so that they stay in its tree."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(pid: int) -> None:
    """Kills a process and its group with whatever it started, in whichever session that is."""
    import psutil

    with contextlib.suppress(psutil.Error):
        # Itself too: it may not lead its group yet.
        for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
    # macOS raises PermissionError for a group of zombies.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
