"""Finds out which walls stand around the Python tool's snippets on this machine: by trying to get out.

Invariant: nothing is said to stand that a probe in the tool's own child did not run into.
"""

import functools
import json
import os
import socket
import tempfile
from pathlib import Path

from custom.tools.builtin import PythonTool

# What a snippet can do without each of the walls that matter, whatever runs beside it.
MISSING = {
    "files_read_only": "a snippet can change your files",
    "files_private": "a snippet can read your files",
    "network_absent": "a snippet can reach the network",
    "processes_contained": "a snippet can start processes that outlive it, or end others",
}

PROBE = """
import fcntl, json, os, resource, socket
def fails(action, *arguments):
    try: action(*arguments)
    except OSError: return True
    return False
def write(path): open(path, "wb", buffering=0).write(bytes(1 << 19))
changes = [(write, FILE), (write, FILE + ".new"), (os.truncate, FILE, 0), (os.chmod, FILE, 0), (os.remove, FILE)]
signals = [(os.kill, PID, 0), (resource.prlimit, PID, resource.RLIMIT_AS), (fcntl.fcntl, 1, fcntl.F_SETOWN, PID)]
print(json.dumps({
    "files_private": fails(open, FILE),
    "files_read_only": all([fails(*change) for change in changes]),
    "disk_limited": not fails(write, "0") and any([fails(write, str(i)) for i in range(1, 4)]),
    "network_absent": fails(lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"out", ADDRESS)),
    "processes_contained": all([fails(*signal) for signal in signals]) and fails(lambda: os.fork() or os._exit(0)),
    "resources_limited": -1 not in (*resource.getrlimit(resource.RLIMIT_AS), *resource.getrlimit(resource.RLIMIT_CPU)),
}))
"""


@functools.cache
def standing_walls() -> dict[str, bool]:
    """Starts the tool's child once, has it try to get out, and says what held; ToolError where it cannot be started.

    Returns, each true where the kernel sees to it, whatever a snippet does to its interpreter:
        files_read_only: it changes no file outside of its folder.
        files_private: it reads no file but the interpreter's.
        disk_limited: it fills its folder to the limit, and no further.
        network_absent: it reaches nothing, this machine neither.
        processes_contained: it starts no process, which could outlive it, and signals none of others.
        resources_limited: its memory and CPU time are limited.
    """
    with (
        tempfile.TemporaryDirectory(prefix="walls-") as folder,
        socket.socket(type=socket.SOCK_DGRAM) as receiver,
    ):
        Path(folder, "private").touch()
        receiver.bind(("127.0.0.1", 0))
        names = f"FILE, ADDRESS, PID = {folder + '/private'!r}, {receiver.getsockname()!r}, {os.getpid()}"
        return json.loads(PythonTool(timeout_s=60, disk_mb=1).execute(names + PROBE))


def missing_walls() -> list[str]:
    """What a snippet can do on this machine and should not, in words; empty where nothing is missing."""
    return [words for name, words in MISSING.items() if not standing_walls()[name]]
