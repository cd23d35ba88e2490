"""Finds out which walls stand around the Python tool's snippets: by trying to get out.

What stands depends on the machine.

Invariant: no wall counts as standing that a probe in the tool's own child did not run into.
"""

import functools
import json
import os
import socket
import sys
import tempfile
from pathlib import Path

from features.sandbox.python_tool import PythonTool

# A snippet can do this without each of the walls that matter, whatever runs beside it.
MISSING = {
    "files_read_only": "a snippet can change your files",
    "files_private": "a snippet can read your files",
    "network_absent": "a snippet can reach the network",
    "processes_contained": (
        "a snippet can start what outlives it, end other processes, or change their priority"
    ),
}

# Runs in the tool's child, behind the names FILE, ADDRESS, PATH, PID, NICE and CPUS: a private
# file, a socket that listens, one that has a file, and a process outside of the walls, with its
# priority and its CPUs, which stay what they are.
PROBE = """
import ctypes, errno, fcntl, json, os, resource, signal, socket

library = ctypes.CDLL(None, use_errno=True)

def ask(name, *arguments):
    if getattr(library, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def fails(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        # A file system without attributes is no wall.
        return error.errno != errno.ENOTSUP
    return False

def write(path):
    open(path, "wb", buffering=0).write(bytes(1 << 19))

def send():
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"out", ADDRESS)

def send_from_pair():
    socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"out", PATH)

def make_queue():
    name = b"/walls%d" % os.getpid()
    ask("mq_open", name, os.O_CREAT | os.O_RDWR, 0o600, None)
    ask("mq_unlink", name)

def outlive_caller():
    # PR_SET_PDEATHSIG: the signal that it gets then, as it was.
    ask("prctl", 1, signal.SIGKILL, 0, 0, 0)

def fork():
    if os.fork() == 0:
        os._exit(0)

changes = [
    (write, FILE),
    (write, FILE + ".new"),
    (os.truncate, FILE, 0),
    (os.chmod, FILE, 0),
    (os.utime, FILE),
    (os.chown, FILE, -1, os.getgid()),
    (os.remove, FILE),
]
others = [
    (os.kill, PID, 0),
    (fcntl.fcntl, 1, fcntl.F_SETOWN, PID),
    (os.setpriority, os.PRIO_PROCESS, PID, NICE),
]
left = [(fork,)]
# macOS has none of these.
if hasattr(os, "setxattr"):
    changes.append((os.setxattr, FILE, "user.walls", b"x"))
    others += [
        (resource.prlimit, PID, resource.RLIMIT_AS),
        (os.sched_setaffinity, PID, CPUS),
    ]
    left += [(make_queue,), (outlive_caller,)]
limits = [*resource.getrlimit(resource.RLIMIT_AS), *resource.getrlimit(resource.RLIMIT_CPU)]
print(json.dumps({
    "files_private": fails(open, FILE),
    "files_read_only": all([fails(*change) for change in changes]),
    "disk_limited": not fails(write, "0") and any([fails(write, str(i)) for i in range(1, 4)]),
    "network_absent": all([fails(send), fails(send_from_pair)]),
    "processes_contained": all([fails(*action) for action in others + left]),
    "resources_limited": -1 not in limits,
}))
"""


@functools.cache
def standing_walls() -> dict[str, bool]:
    """Starts the tool's child once, and has it try to get out.

    Returns, each true where the kernel sees to it, whatever a snippet does to its interpreter:
        files_read_only: it changes no file outside of its folder.
        files_private: it reads no file but the interpreter's.
        disk_limited: it fills its folder to the limit, and no further.
        network_absent: it reaches nothing, this machine neither.
        processes_contained: it starts no process and no queue, which could outlive it, and neither
            signals other processes nor changes how they are scheduled.
        resources_limited: its memory and CPU time are limited.
    Raises:
        ToolError: the child cannot be started.
    """
    with (
        tempfile.TemporaryDirectory(prefix="walls-") as folder,
        socket.socket(type=socket.SOCK_DGRAM) as receiver,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local,
    ):
        file = Path(folder, "private")
        file.touch()
        receiver.bind(("127.0.0.1", 0))
        local.bind(f"{folder}/socket")
        names = {
            "FILE": str(file),
            "ADDRESS": receiver.getsockname(),
            "PATH": local.getsockname(),
            "PID": os.getpid(),
            "NICE": os.getpriority(os.PRIO_PROCESS, 0),
            "CPUS": _cpus(),
        }
        lines = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        return json.loads(PythonTool(timeout_s=60, disk_mb=1).execute(lines + PROBE))


def _cpus() -> set[int]:
    """Returns the CPUs that this process may use; none are known on macOS."""
    if sys.platform == "linux":
        return os.sched_getaffinity(0)
    return set()


def missing_walls() -> list[str]:
    """Returns what a snippet can do on this machine and should not, in words."""
    standing = standing_walls()
    return [words for name, words in MISSING.items() if not standing[name]]
