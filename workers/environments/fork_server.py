"""The side of a fork server that asks for children; its process is fork_server_process.py.

    this process                      fork server                     a child
    ForkServer.start   --request, files-->  fork  ---------------->   run(request, files)
    Child.ended        <--exit code-------  reap  <-- ended, with all that it started

The fork server has imported what children need, so that each starts in milliseconds. It is ours and
not multiprocessing's "forkserver", which imports the main script, with its torch, in every child.

Invariant: every child that was started is reported once, by `Child.ended`, when it and all that it
started are gone; also where the fork server itself has died.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.environments import fork_server_process
from workers.environments.fork_server_process import (
    LENGTH,
    environment_of,
    frame_of,
    kill_family,
)

SCRIPT = str(Path(fork_server_process.__file__))
# The longest that a request may wait for a fork server that does not read, in whole seconds.
SEND_S = 20
# The longest wait for the thread that reads, behind the end of what it reads, in seconds.
JOIN_S = 5.0


class CannotFork(RuntimeError):
    """Reports that there is no process for a child."""


class ForkServerLost(CannotFork):
    """Reports that the fork server has died, and its children with it."""


def pending() -> "Future[Any]":
    """Makes a future that nobody can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass(eq=False, frozen=True, kw_only=True)
class Child:
    """Describes a process that a fork server forks.

    Attributes:
        mark: an entry of the environment of what it starts, by which that is known; "": none.
        started: its process id, or CannotFork.
        ended: its exit code, negative for a signal, or ForkServerLost.
    """

    id: int
    server: "ForkServer"
    mark: str
    started: "Future[int]" = field(default_factory=pending)
    ended: "Future[int]" = field(default_factory=pending)

    def kill(self) -> None:
        """Kills it with all that it started; may be called at any time, from any thread."""
        if not self.ended.done():
            # One that is gone has ended all children.
            with contextlib.suppress(ForkServerLost):
                self.server.send({"kill": self.id})


class ForkServer:
    """Forks children from a process that has imported some modules; any thread may call.

    Args:
        child_file: says what a child does; see fork_server_process.py.
        modules: what is imported beforehand.
        python: the interpreter, and options of its own behind it.
        path: the path of modules; None: the interpreter's own.
        variables: further environment variables of the interpreter that imports.

    Attributes:
        ready: why modules could not be imported, by name, once children can start.
        is_lost: the process has died; it starts nothing more.
    """

    def __init__(
        self,
        child_file: Path,
        *,
        modules: Sequence[str] = (),
        python: Sequence[str] = (sys.executable,),
        path: Sequence[str] | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.ready: Future[dict[str, str]] = pending()
        self.is_lost = False
        self._children: dict[int, Child] = {}
        self._count = 0
        self._sending = threading.Lock()
        self._socket, theirs = socket.socketpair()
        # One that has been stopped reads nothing.
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_S, 0)
        )
        with theirs:
            arguments = {
                "control_fd": theirs.fileno(),
                "child_file": str(child_file),
                "path": None if path is None else list(path),
                "modules": list(modules),
            }
            self._process = subprocess.Popen(
                [*python, SCRIPT, json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                # What goes by the order of sets is to be equal in every run.
                env={"PYTHONHASHSEED": "0"} | os.environ | dict(variables or {}),
            )
        self._reader = threading.Thread(target=self._read, name="fork server", daemon=True)
        self._reader.start()

    def start(self, request: dict[str, Any], files: Sequence[int], mark: str = "") -> Child:
        """Has a child forked; its files remain the caller's to close. Raises ForkServerLost.

        Args:
            request: what the child file's `run` is given, with the files.
            mark: see `Child`.
        """
        with self._sending:
            self._count += 1
            child = Child(id=self._count, server=self, mark=mark)
        # Before it is asked for: the answer may come at once.
        self._children[child.id] = child
        try:
            self.send({"id": child.id, "mark": mark, "request": request}, files)
        except ForkServerLost:
            self._children.pop(child.id, None)
            raise
        return child

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Sends a message, and the files that belong to it. Raises ForkServerLost."""
        try:
            with self._sending:
                # A child may have stopped it.
                self._process.send_signal(signal.SIGCONT)
                socket.send_fds(self._socket, [b"+"], files)
                self._socket.sendall(frame_of(message))
        except OSError as error:
            self.is_lost = True
            # The rest of a frame would be taken for another.
            self._process.kill()
            raise ForkServerLost(f"the fork server is gone: {error}") from None

    def stop(self) -> None:
        """Ends the fork server and every child that is left, with whatever those started."""
        if self._process.poll() is None:
            kill_family(self._process.pid)
        self._process.wait()
        self._reader.join(JOIN_S)
        self._socket.close()

    def _read(self) -> None:
        """Reads what the fork server says, until it is gone."""
        with contextlib.suppress(OSError):
            for message in self._messages():
                self._take(message)
        self._lose_all()

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Reads frames, until the last whole one."""
        with self._socket.makefile("rb") as stream:
            while True:
                head = stream.read(LENGTH.size)
                if len(head) < LENGTH.size:
                    return
                (length,) = LENGTH.unpack(head)
                data = stream.read(length)
                if len(data) < length:
                    return
                yield json.loads(data)

    def _take(self, message: dict[str, Any]) -> None:
        """Takes in one message."""
        if "ready" in message:
            self.ready.set_result(message["ready"])
        elif "pid" in message:
            self._children[message["id"]].started.set_result(message["pid"])
        elif "error" in message:
            error = CannotFork(message["error"])
            self._children.pop(message["id"]).started.set_exception(error)
        else:
            self._children.pop(message["id"]).ended.set_result(message["code"])

    def _lose_all(self) -> None:
        """Reports every child as ended, as they end with their fork server."""
        self.is_lost = True
        lost = list(self._children.values())
        kill_marked({child.mark for child in lost if child.mark})
        error = ForkServerLost("the fork server died")
        futures: list[Future[Any]] = [self.ready]
        for child in lost:
            futures += [child.started, child.ended]
        for future in futures:
            if not future.done():
                future.set_exception(error)


def kill_marked(marks: set[str]) -> None:
    """Kills what children of these marks have started, where their fork server no longer does."""
    if not marks or sys.platform != "linux":
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and marks & environment_of(int(entry.name)):
            kill_family(int(entry.name))
