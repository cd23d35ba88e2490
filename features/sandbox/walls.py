"""Finds out which walls stand around the Python tool's snippets: by trying to get out.

What stands depends on the machine.

Invariant: no wall counts as standing that a probe in the tool's own child did not run into.
"""

import functools
import json
import os
import socket
import tempfile
from pathlib import Path

from features.sandbox.python_tool import PythonTool

# A snippet can do this without each of the walls that matter, whatever runs beside it.
MISSING = {
    "files_read_only": "a snippet can change your files",
    "files_private": "a snippet can read your files",
    "network_absent": "a snippet can reach the network",
    "processes_contained": "a snippet can start processes that outlive it, or end others",
}

# Runs in the tool's child, behind the names FILE, ADDRESS and PID: a private file, a socket that
# listens and a process outside of the walls.
PROBE = """
import fcntl, json, os, resource, socket

def fails(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return True
    return False

def write(path):
    open(path, "wb", buffering=0).write(bytes(1 << 19))

def send():
    socket.socket(type=socket.SOCK_DGRAM).sendto(b"out", ADDRESS)

def fork():
    if os.fork() == 0:
        os._exit(0)

changes = [
    (write, FILE),
    (write, FILE + ".new"),
    (os.truncate, FILE, 0),
    (os.chmod, FILE, 0),
    (os.remove, FILE),
]
signals = [
    (os.kill, PID, 0),
    (resource.prlimit, PID, resource.RLIMIT_AS),
    (fcntl.fcntl, 1, fcntl.F_SETOWN, PID),
]
limits = [*resource.getrlimit(resource.RLIMIT_AS), *resource.getrlimit(resource.RLIMIT_CPU)]
print(json.dumps({
    "files_private": fails(open, FILE),
    "files_read_only": all([fails(*change) for change in changes]),
    "disk_limited": not fails(write, "0") and any([fails(write, str(i)) for i in range(1, 4)]),
    "network_absent": fails(send),
    "processes_contained": all([fails(*signal) for signal in signals]) and fails(fork),
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
        processes_contained: it starts no process, which could outlive it, and signals none of
            others.
        resources_limited: its memory and CPU time are limited.
    Raises:
        ToolError: the child cannot be started.
    """
    with (
        tempfile.TemporaryDirectory(prefix="walls-") as folder,
        socket.socket(type=socket.SOCK_DGRAM) as receiver,
    ):
        file = Path(folder, "private")
        file.touch()
        receiver.bind(("127.0.0.1", 0))
        address = receiver.getsockname()
        names = f"FILE, ADDRESS, PID = {str(file)!r}, {address!r}, {os.getpid()}"
        return json.loads(PythonTool(timeout_s=60, disk_mb=1).execute(names + PROBE))


def missing_walls() -> list[str]:
    """Returns what a snippet can do on this machine and should not, in words."""
    standing = standing_walls()
    return [words for name, words in MISSING.items() if not standing[name]]
