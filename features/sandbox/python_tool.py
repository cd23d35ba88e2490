"""The Python tool: runs a snippet in a process of its own, with bounded time, memory and output.

Invariant: when a call returns, the process it started is gone with all its children, and its folder
with it.
"""

import math
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import IO

from custom.confine import kill_tree, temporary_folder
from custom.tools.definition import Tool, ToolDefinition, ToolError

# The child's side; found by its path, since it runs without this project's packages.
PROGRAM = Path(__file__).with_name("python_snippet.py")
# Isolated from variables and users' packages, no site packages, no bytecode, unbuffered, UTF-8.
INTERPRETER_FLAGS = ("-I", "-S", "-B", "-u", "-X", "utf8")
MIB = 1 << 20
# The least that a written file, and what is printed, may take.
MIN_FILE_BYTES = MIB
# Seconds between two looks at whether the process has ended.
POLL_S = 0.002


@dataclass(kw_only=True, eq=False)
class PythonTool(Tool):
    """Runs a snippet in a process of its own, with limits; what it prints is the result.

    The process has no network, an empty working folder that goes with it and no other of the user's
    files, none of this process's environment variables and the standard library only; it is killed
    with all its children. On Linux the kernel sees to it: python_snippet.py says how,
    `standing_walls()` what of it this machine allows.

    Args:
        timeout_s: seconds, of the wall's clock and of CPU time.
        memory_mb: address space, in MiB.
        max_output: characters that are shown; a file, and what is printed, takes no more than 1 MiB
            (or 8 bytes a character).
        disk_mb: what it may write in all, in MiB.
    """

    definition = ToolDefinition(
        name="python",
        description=(
            "Runs a Python 3 snippet (standard library, no network) and returns what it prints, "
            "and the value of its last expression."
        ),
        parameters={
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
            "additionalProperties": False,
        },
    )

    timeout_s: float = 5.0
    memory_mb: int = 512
    max_output: int = 10_000
    disk_mb: int = 16

    def execute(self, code: str) -> str:
        """Returns what the snippet printed.

        Raises:
            TimeoutError, ToolError: where it failed, with what it printed.
        """
        # A file: a pipe would have to be read while the snippet runs.
        with (
            temporary_folder("snippet-") as workdir,
            tempfile.TemporaryFile() as output,
        ):
            (workdir / "snippet.py").write_bytes(code.encode("utf-8", "replace"))
            with self._start(workdir, output) as process:
                try:
                    overran = self._overruns(process.pid)
                finally:
                    # Leaving the block waits for it.
                    kill_tree(process.pid)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
            return self._result(text, overran, process.returncode)

    def _start(self, workdir: Path, output: IO[bytes]) -> Popen[bytes]:
        """Starts the child; its arguments are those of `python_snippet.main`."""
        caller = os.getpid()
        cpu_s = max(math.ceil(self.timeout_s), 1)
        memory_bytes = self.memory_mb * MIB
        file_bytes = max(MIN_FILE_BYTES, 8 * self.max_output)
        disk_bytes = self.disk_mb * MIB
        arguments = [caller, cpu_s, memory_bytes, file_bytes, disk_bytes]
        return Popen(
            [sys.executable, *INTERPRETER_FLAGS, str(PROGRAM), *map(str, arguments)],
            cwd=os.path.realpath(workdir),
            env={"HOME": str(workdir), "LANG": "C.UTF-8"},
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )

    def _overruns(self, pid: int) -> bool:
        """Waits for the process's end; returns True where it is still running at its deadline."""
        deadline = time.monotonic() + self.timeout_s
        # The status is left: the number is not given to another process before the kill.
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() > deadline:
                return True
            time.sleep(POLL_S)
        return False

    def _result(self, text: str, overran: bool, status: int) -> str:
        if len(text) > self.max_output:
            raise ToolError(
                f"{text[: self.max_output]}\n[ended after {self.max_output} characters of output]"
            )
        if overran:
            raise TimeoutError(f"{text}\n[ended after {self.timeout_s:g} s]".lstrip())
        if status != 0:
            raise ToolError(text.rstrip() or f"[ended with status {status}]")
        return text.rstrip("\n")
