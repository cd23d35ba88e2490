"""Stands between a run and an MCP server that is a process: it ends the server, and bounds it.

    run (mcp's stdio client) <-- lines of JSON --> this process <-- the same --> the server

Invariant: the server and whatever it started end with this process, which ends when the run closes
the connection, or is gone however it ended; and no line, nor all that comes without being asked
for, is longer than the run can bear.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import BinaryIO, NoReturn

# At once, not where it is needed: a signal that ends this process may come at any moment, and in
# the midst of this import nothing could be ended.
import psutil

from custom.confine import PR_SET_PDEATHSIG, adopt_orphans, die_with_parent, kill_tree

# The most bytes of one line.
MAX_LINE = 8 * 2**20
# The most bytes of all lines since the run's last one, and the most lines.
MAX_UNASKED = 64 * 2**20
MAX_UNASKED_LINES = 2_000
# The most bytes that the server may write to its standard error.
MAX_STDERR = 64 * 2**10
# Seconds for the server to end by itself once its standard input is closed.
GRACE_S = 1.0


class Guard:
    """Runs a server, and hands lines to and fro."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.unasked = 0
        self.unasked_lines = 0
        self.server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def run(self) -> NoReturn:
        """Hands lines on until either side ends."""
        assert self.server.stdin and self.server.stdout and self.server.stderr
        for target, stream in (
            (self.hand_back, self.server.stdout),
            (self.hand_on_errors, self.server.stderr),
        ):
            threading.Thread(target=target, args=(stream,), daemon=True).start()
        # The server may be gone, or this process be told to end.
        with contextlib.suppress(OSError, ValueError):
            for line in sys.stdin.buffer:
                self.unasked = 0
                self.unasked_lines = 0
                self.server.stdin.write(line)
                self.server.stdin.flush()
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.server.stdin.close()
            self.server.wait(GRACE_S)
        self.end(0)

    def hand_back(self, lines: BinaryIO) -> None:
        """Hands the server's messages to the run, and leaves out what is none."""
        out = sys.stdout.buffer
        while True:
            line = lines.readline(MAX_LINE)
            if not line:
                code = self.server.wait()
                self.end(1, f"ended (exit code {code})" if code else "")
            self.unasked += len(line)
            self.unasked_lines += 1
            if len(line) == MAX_LINE and not line.endswith(b"\n"):
                self.end(1, f"wrote a line of {MAX_LINE:,} bytes or more")
            if self.unasked > MAX_UNASKED or self.unasked_lines > MAX_UNASKED_LINES:
                self.end(
                    1,
                    f"wrote {self.unasked_lines:,} lines of {self.unasked:,} bytes that nobody "
                    "asked for",
                )
            # Many servers print what is no message.
            if line.startswith(b"{"):
                try:
                    out.write(line)
                    out.flush()
                except OSError:
                    self.end(1)

    def hand_on_errors(self, stream: BinaryIO) -> None:
        """Shows the beginning of what the server writes to its standard error."""
        left = MAX_STDERR
        with contextlib.suppress(OSError):
            while part := os.read(stream.fileno(), 2**16):
                sys.stderr.buffer.write(part[:left])
                sys.stderr.buffer.flush()
                left = max(0, left - len(part))

    def end(self, code: int, why: str = "") -> NoReturn:
        """Ends the server with whatever it started, and then this process."""
        if why:
            print(f"MCP server {self.name} {why}", file=sys.stderr, flush=True)
        kill_tree(self.server.pid)
        kill_children()
        os._exit(code)


def kill_children() -> None:
    """Ends what the server left behind, which this process has adopted."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()


def main(name: str, command: Sequence[str]) -> None:
    """Runs a server until this process is told to end, or nobody is there to ask it."""
    adopt_orphans()
    try:
        guard = Guard(name, command)
    except OSError as error:
        print(f"MCP server {name} does not start: {error}", file=sys.stderr)
        sys.exit(1)
    signal.signal(signal.SIGTERM, lambda *_: guard.end(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Unlike a kill, this leaves the time to end the server's own children. The end of the
    # connection says the same, unless another process has inherited that.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    guard.run()
