"""The pool's side of programs' processes: a fork server starts them, pipes carry what they say.

It belongs to the thread whose event loop makes it. Invariant: every program that was started is
reported once, by `Program.wait`, when it and all that it started are gone; also where the fork
server itself has died.
"""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.environments.fork_server import CannotFork, Child, ForkServer, ForkServerLost

CHILD_FILE = Path(__file__).with_name("program_process.py")
# A program's environment names it by this, and what it starts inherits that.
MARK = "PROGRAM_ATTEMPT"
# So many bytes are kept of the ends of a program's output and of its errors.
KEPT_BYTES = 20_000
READ_BYTES = 1 << 16
# Files that a program may have open.
OPEN_FILES = 1024
# The longest that a launcher may take to import what it is to preload, in seconds.
READY_S = 120.0
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
        child: its first process.
        pid: of that.
        exit_code: negative for a signal; None while it runs.
    """

    child: Child
    pid: int
    output: bytes = b""
    errors: bytes = b""
    exit_code: int | None = None
    readers: list["asyncio.Task[None]"] = field(default_factory=list)

    async def wait(self) -> int:
        """Waits for its end, and for the end of its output; returns the exit code."""
        try:
            self.exit_code = await asyncio.wrap_future(self.child.ended)
        except ForkServerLost:
            self.exit_code = LOST
        if self.readers:
            # All that might hold the pipes open is gone.
            await asyncio.wait(self.readers, timeout=LAST_OUTPUT_S)
        for reader in self.readers:
            reader.cancel()
        return self.exit_code

    def kill(self) -> None:
        """Kills it with all that it started; `wait` tells when they are gone."""
        self.child.kill()


class Launcher:
    """Starts programs, by a process of the interpreter that has imported some modules.

    Args:
        python: the interpreter.
        modules: what it imports beforehand.
        memory_gb: GiB that each process of a program may take; None: any.
        variables: further environment variables of the interpreter that imports.
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
        self._memory_bytes = None if memory_gb is None else int(memory_gb * 2**30)
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.Semaphore(MAX_STARTING)
        self._server = ForkServer(
            CHILD_FILE,
            modules=self.modules,
            python=(python,),
            # Its own requests go to this machine.
            variables={"no_proxy": "127.0.0.1"} | dict(variables or {}),
        )

    @property
    def is_lost(self) -> bool:
        """Returns whether its process has died: it starts nothing more."""
        return self._server.is_lost

    async def start(
        self, argv: Sequence[str], env: dict[str, str], input: bytes, folder: str = ""
    ) -> Program:
        """Starts a program; raises CannotStart.

        Args:
            env: all of its environment; MARK in it names the attempt.
            input: what it may read on standard input.
            folder: in which it works; "": where the trainer was started.
        """
        await self._wait_until_ready()
        request = {
            "argv": list(argv),
            "env": env,
            "folder": folder,
            "memory_bytes": self._memory_bytes,
            "open_files": OPEN_FILES,
            "forks": bool(self.modules),
        }
        pipes = [os.pipe() for _ in range(3)]
        (their_input, our_input), (our_output, output), (our_errors, errors) = pipes
        try:
            program = await self._fork(request, [their_input, output, errors])
        except BaseException:
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
        self._server.stop()

    async def _wait_until_ready(self) -> None:
        """Waits until programs can be started; raises CannotStart where modules are missing."""
        try:
            failures = await asyncio.wait_for(asyncio.wrap_future(self._server.ready), READY_S)
        except TimeoutError:
            raise CannotStart(
                f"programs.preload: importing {', '.join(self.modules)} took more than "
                f"{READY_S:g} s"
            ) from None
        except ForkServerLost:
            raise CannotStart("the launcher of programs has died") from None
        if failures:
            reasons = "; ".join(f"{name} ({error})" for name, error in failures.items())
            raise CannotStart(
                f"programs.preload=[{', '.join(self.modules)}]: {self.python} cannot import "
                f"{reasons}: name modules that this interpreter has"
            )

    async def _fork(self, request: dict[str, Any], files: list[int]) -> Program:
        """Has a program started with these files, which are closed here."""
        mark = f"{MARK}={request['env'][MARK]}"
        try:
            # A socket takes few files, and little that is not read yet.
            async with self._starting:
                child = self._server.start(request, files, mark)
                pid = await asyncio.wrap_future(child.started)
        except CannotFork as error:
            raise CannotStart(f"no process for a program: {error}") from None
        finally:
            for file in files:
                os.close(file)
        return Program(child, pid)

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
