"""The pool's side of a launcher, the process that starts programs (preload.py).

It belongs to the thread whose event loop makes it. Invariant: every program that was started is
reported once, by `Program.wait`, when it and all that it started are gone; also where the launcher
itself has died.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from features.programs.preload import LENGTH, MARK, kill_family, mark_of

SCRIPT = Path(__file__).with_name("preload.py")
# So many bytes are kept of the ends of a program's output and of its errors.
KEPT_BYTES = 20_000
READ_BYTES = 1 << 16
# Files that a program may have open.
OPEN_FILES = 1024
# The longest that a launcher may take to import what it is to preload, and to end, in seconds.
READY_S = 120.0
END_S = 5.0
# The longest wait for the rest of an ended program's output, in seconds.
LAST_OUTPUT_S = 1.0
# Programs that are being started at the same time.
MAX_STARTING = 8
# So much of standard input a pipe takes at once, in bytes.
PIPE_BYTES = 1 << 12
# The exit code of a program whose launcher has died.
LOST = -9


class CannotStart(RuntimeError):
    """Reports that a program does not start."""


@dataclass(eq=False)
class Program:
    """Holds a program that runs, and the ends of what it wrote.

    Attributes:
        pid: of its first process.
        mark: by which what it starts is known.
        exit_code: negative for a signal; None while it runs.
    """

    id: int
    launcher: "Launcher"
    ended: "asyncio.Future[int]"
    mark: str
    pid: int = 0
    output: bytes = b""
    errors: bytes = b""
    exit_code: int | None = None
    readers: list["asyncio.Task[None]"] = field(default_factory=list)

    async def wait(self) -> int:
        """Waits for its end, and for the end of its output; returns the exit code."""
        self.exit_code = await asyncio.shield(self.ended)
        if self.readers:
            # All that might hold the pipes open is gone.
            await asyncio.wait(self.readers, timeout=LAST_OUTPUT_S)
        for reader in self.readers:
            reader.cancel()
        return self.exit_code

    def kill(self) -> None:
        """Kills it with all that it started; `wait` tells when they are gone."""
        if not self.ended.done():
            self.launcher.post({"kill": self.id})


class Launcher:
    """Starts programs, by a process of the interpreter that has imported some modules.

    Args:
        python: the interpreter.
        modules: what it imports beforehand.
        memory_gb: GiB that each process of a program may take; None: any.
        variables: further environment variables of the interpreter that imports.

    Attributes:
        is_lost: its process has died; it starts nothing more.
    """

    def __init__(
        self,
        python: str,
        modules: Sequence[str] = (),
        memory_gb: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.python = python
        self.modules = list(modules)
        self.is_lost = False
        self._memory_bytes = None if memory_gb is None else int(memory_gb * 2**30)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._started: dict[int, asyncio.Future[int]] = {}
        self._programs: dict[int, Program] = {}
        self._gate = asyncio.Lock()
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._count = 0
        self._socket, theirs = socket.socketpair()
        # Its own requests go to this machine.
        environment = {"PYTHONHASHSEED": "0"} | os.environ | {"no_proxy": "127.0.0.1"}
        environment |= dict(variables or {})
        with theirs:
            self._process = subprocess.Popen(
                [python, str(SCRIPT), str(theirs.fileno()), *self.modules],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        self._socket.setblocking(False)
        self._reading = self._loop.create_task(self._read())
        self._posts: list[asyncio.Task[None]] = []

    async def start(self, argv: Sequence[str], env: dict[str, str], input: bytes) -> Program:
        """Starts a program; raises CannotStart.

        Args:
            env: all of its environment; MARK in it names the attempt.
            input: what it may read on standard input.
        """
        assert MARK in env
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), READY_S)
        except TimeoutError:
            raise CannotStart(
                f"programs.preload: importing {', '.join(self.modules)} took more than "
                f"{READY_S:g} s"
            ) from None
        self._count += 1
        program = Program(self._count, self, self._loop.create_future(), env[MARK])
        self._programs[program.id] = program
        pipes = [os.pipe() for _ in range(3)]
        (their_input, our_input), (our_output, output), (our_errors, errors) = pipes
        request = {
            "id": program.id,
            "argv": list(argv),
            "env": env,
            "memory_bytes": self._memory_bytes,
            "open_files": OPEN_FILES,
            "forks": bool(self.modules),
        }
        try:
            program.pid = await self._ask_for(program.id, request, [their_input, output, errors])
        except BaseException:
            self._programs.pop(program.id, None)
            for file in (our_input, our_output, our_errors):
                os.close(file)
            raise
        program.readers = [
            self._loop.create_task(self._keep_end(program, "output", our_output)),
            self._loop.create_task(self._keep_end(program, "errors", our_errors)),
        ]
        if len(input) > PIPE_BYTES:
            program.readers.append(self._loop.create_task(self._write(our_input, input)))
            return program
        # A program that has ended already reads nothing.
        with contextlib.suppress(BrokenPipeError):
            os.write(our_input, input)
        os.close(our_input)
        return program

    def stop(self) -> None:
        """Ends the launcher and every program that is left."""
        self._reading.cancel()
        self._wake()
        self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lose_all()

    def post(self, request: dict[str, Any]) -> None:
        """Sends a request that is not answered by itself."""
        self._posts = [task for task in self._posts if not task.done()]
        self._posts.append(self._loop.create_task(self._post(request)))

    async def _post(self, request: dict[str, Any]) -> None:
        # One that is gone has ended all programs.
        with contextlib.suppress(OSError):
            async with self._gate:
                await self._send(request, [])

    async def _ask_for(self, number: int, request: dict[str, Any], files: list[int]) -> int:
        """Has a program started with these files, which are closed here; returns its pid."""
        answer: asyncio.Future[int] = self._loop.create_future()
        self._started[number] = answer
        try:
            # A socket takes few files, and a frame must be whole.
            async with self._starting:
                async with self._gate:
                    await self._send(request, files)
                return await answer
        except OSError as error:
            raise CannotStart(f"the launcher of programs is gone: {error}") from None
        finally:
            del self._started[number]
            for file in files:
                os.close(file)

    async def _send(self, request: dict[str, Any], files: list[int]) -> None:
        self._wake()
        data = json.dumps(request).encode()
        if files:
            while True:
                try:
                    socket.send_fds(self._socket, [b"+"], files)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.01)
        else:
            await self._loop.sock_sendall(self._socket, b"+")
        await self._loop.sock_sendall(self._socket, LENGTH.pack(len(data)) + data)

    def _wake(self) -> None:
        """Lets a launcher go on that one of its programs has stopped."""
        self._process.send_signal(signal.SIGCONT)

    async def _read(self) -> None:
        """Reads what the launcher says, until it is gone."""
        buffer = b""
        with contextlib.suppress(OSError):
            while block := await self._loop.sock_recv(self._socket, READ_BYTES):
                buffer += block
                while len(buffer) >= LENGTH.size:
                    (length,) = LENGTH.unpack(buffer[: LENGTH.size])
                    end = LENGTH.size + length
                    if len(buffer) < end:
                        break
                    self._take(json.loads(buffer[LENGTH.size : end]))
                    buffer = buffer[end:]
        self._lose_all()

    def _take(self, told: dict[str, Any]) -> None:
        """Takes in one frame."""
        if "ready" in told:
            self._take_ready(told["ready"])
        elif "pid" in told:
            self._started[told["id"]].set_result(told["pid"])
        elif "error" in told:
            error = CannotStart(f"no process for a program: {told['error']}")
            self._started[told["id"]].set_exception(error)
        else:
            program = self._programs.pop(told["id"], None)
            if program is not None:
                program.ended.set_result(told["code"])

    def _take_ready(self, failures: Mapping[str, str]) -> None:
        """Takes in that programs can be started, or which modules could not be imported."""
        if not failures:
            self._ready.set_result(None)
            return
        reasons = "; ".join(f"{name} ({error})" for name, error in failures.items())
        self._ready.set_exception(
            CannotStart(
                f"programs.preload=[{', '.join(self.modules)}]: {self.python} cannot import "
                f"{reasons}: name modules that this interpreter has"
            )
        )
        # Nobody may be waiting for it.
        self._ready.exception()

    def _lose_all(self) -> None:
        """Reports every program as ended, as they end with their launcher."""
        self.is_lost = True
        kill_marked({program.mark for program in self._programs.values()})
        for program in self._programs.values():
            if not program.ended.done():
                program.ended.set_result(LOST)
        self._programs = {}
        lost = CannotStart("the launcher of programs has died")
        answers: list[asyncio.Future[Any]] = [self._ready, *self._started.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(lost)
                # Nobody may be waiting for it.
                answer.exception()

    async def _keep_end(self, program: Program, name: str, file: int) -> None:
        """Reads a pipe to its end; keeps the last bytes."""
        reader = asyncio.StreamReader()
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(file, "rb")
        )
        try:
            while block := await reader.read(READ_BYTES):
                kept = getattr(program, name) + block
                setattr(program, name, kept[-KEPT_BYTES:])
        finally:
            transport.close()

    async def _write(self, file: int, data: bytes) -> None:
        """Writes standard input; a program need not read it."""
        transport, protocol = await self._loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(file, "wb")
        )
        writer = asyncio.StreamWriter(transport, protocol, None, self._loop)
        with contextlib.suppress(OSError):
            writer.write(data)
            writer.close()
            await asyncio.sleep(0)


def kill_marked(marks: set[str]) -> None:
    """Kills what the programs of these marks have started, where their launcher no longer does."""
    if not marks or sys.platform != "linux":
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and mark_of(int(entry.name)) in marks:
            kill_family(int(entry.name))
