"""The sentry: a process that says which environment holds the interpreter's lock, when nothing else in the run can.

Environments in threads share the run's interpreter. One that keeps its lock in code other than Python stops every
thread, the pool's watch included. So the pool notes in shared memory which calls run and, once a second, that it lives:

    shared memory    [beat] [call 0: start, thread, text] [call 1: …] …     seconds on the monotonic clock

Invariant: nothing waits for the sentry; a run without it goes on unwatched.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BEAT = struct.Struct("=d")
CALL = struct.Struct("=dq112s")
MAX_CALLS = 4096
STALL_S = 10.0


class Sentry:
    """Is the run's side: notes calls and beats; `stall_s` without a beat mean that the lock is held."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(BEAT.size + MAX_CALLS * CALL.size)
            self._memory = mmap.mmap(file.fileno(), 0)
            self._free = list(range(MAX_CALLS))
            self.beat()
            arguments = [str(file.fileno()), str(os.getpid()), str(stall_s)]
            command = [sys.executable, "-I", "-S", __file__, *arguments]
            self._process = subprocess.Popen(command, pass_fds=[file.fileno()], stdin=subprocess.DEVNULL)

    def beat(self) -> None:
        """Notes that this process's threads run."""
        BEAT.pack_into(self._memory, 0, time.monotonic())

    @contextmanager
    def watching(self, text: str, thread: int) -> Iterator[None]:
        """Notes a call for as long as the block runs; `thread` is its native id."""
        place = None
        with contextlib.suppress(IndexError):
            place = self._free.pop()
            CALL.pack_into(self._memory, _offset(place), time.monotonic(), thread, text.encode()[:112])
        try:
            yield
        finally:
            if place is not None:
                CALL.pack_into(self._memory, _offset(place), 0.0, 0, b"")
                self._free.append(place)

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def _offset(place: int) -> int:
    return BEAT.size + place * CALL.size


def watch(memory: mmap.mmap, pid: int, stall_s: float) -> None:
    """Says once for each time that beats stop what ran then; until the watched process is gone."""
    said = 0.0
    while os.getppid() == pid:
        time.sleep(1.0)
        (beat,) = BEAT.unpack_from(memory, 0)
        if beat != said and time.monotonic() - beat > stall_s and not is_stopped(pid):
            said = beat
            print(report(memory, pid, beat), file=sys.stderr, flush=True)


def report(memory: mmap.mmap, pid: int, beat: float) -> str:
    """Names the calls that run, those first whose threads compute."""
    before = {thread: cpu_ticks(pid, thread) for _, thread, _ in running(memory)}
    time.sleep(0.5)
    calls = sorted(running(memory), key=lambda call: (cpu_ticks(pid, call[1]) <= before.get(call[1], 0), -call[0]))
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - time.monotonic() + beat))
    named = "; ".join(f"{text}, for {time.monotonic() - start:.0f} s" for start, _, text in calls[:3]) or "no call"
    return (
        f"WARNING: since {since} no thread of process {pid} has run: code other than Python holds the interpreter's "
        f"lock. Running: {named}. agent.environment.isolation=process ends such a call at its deadline"
    )


def running(memory: mmap.mmap) -> list[tuple[float, int, str]]:
    """Lists start, thread and text of the calls that run."""
    calls = (CALL.unpack_from(memory, _offset(place)) for place in range(MAX_CALLS))
    return [(start, thread, text.rstrip(b"\0").decode(errors="replace")) for start, thread, text in calls if start]


def cpu_ticks(pid: int, thread: int) -> int:
    """Returns the clock ticks that a thread has computed for; 0 where nobody says."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError, ValueError):
        return 0


def is_stopped(pid: int) -> bool:
    """Says whether somebody has stopped the process, as a debugger or Ctrl-Z does."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    watch(mmap.mmap(int(sys.argv[1]), 0), int(sys.argv[2]), float(sys.argv[3]))
