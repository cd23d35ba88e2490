"""Makes a run's viewer in a process beside it, each time that it is asked to.

    python -m features.viewer.follower RUN_DIR

reads lines from standard input, GOES_ON or ENDED, and answers each with a line when the viewer is
made: MADE, or why it is not. The process stays between two of them, since to import what it needs
takes seconds, and to add what is new of a run a tenth of one. Invariant: it ends when its input
does, so that no process outlives its run, and it computes while nobody else wants to.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from features.viewer.build import build_viewer
from features.viewer.command import find_run, own_folder
from training.config.section import PROJECT_ROOT
from training.run.signals import EndingSignals

GOES_ON = "goes on"
ENDED = "ended"
MADE = "made"
STOP_S = 5.0


class Follower:
    """Starts the process and asks it.

    Args:
        run_dir: the run's folder.

    Attributes:
        process: the process.
        is_asked: whether an answer is still to come.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.is_asked = False
        self._read = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "features.viewer.follower", str(run_dir.absolute())],
            cwd=PROJECT_ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, self.process.pid, 19)
            os.sched_setscheduler(self.process.pid, os.SCHED_IDLE, os.sched_param(0))

    def ask(self, word: str) -> None:
        """Asks for the viewer of all that lies on disk, once the answer before has come."""
        self.is_asked = True
        # One that has ended says so in its answer.
        with suppress(BrokenPipeError):
            self._stdin.write(f"{word}\n".encode())
            self._stdin.flush()

    def answer(self, timeout_s: float) -> str | None:
        """Returns MADE, or why it is not made; None if nothing has come after so many seconds."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdout, selectors.EVENT_READ)
            while b"\n" not in self._read:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                read = os.read(self._stdout.fileno(), 4096)
                if not read:
                    return self._how_it_ended()
                self._read += read
        line, _, self._read = self._read.partition(b"\n")
        self.is_asked = False
        return line.decode(errors="replace")

    def stop(self) -> bool:
        """Ends the process; returns whether it had no time to take away what it had begun."""
        is_killed = False
        if self.process.poll() is None:
            # As Ctrl-C.
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                is_killed = True
                self.process.kill()
                self.process.wait()
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        return is_killed

    def _how_it_ended(self) -> str:
        self.is_asked = False
        return (
            f"exit code {self.process.wait()} of the process that makes it; "
            f"`python -m features.viewer.command {self.run_dir}` says why"
        )

    @property
    def _stdin(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


def make(run_dir: Path, *, goes_on: bool) -> str:
    """Makes RUN_DIR/viewer; returns MADE, or why it is not, in one line."""
    try:
        run = find_run(run_dir, 0)
        build_viewer([run], own_folder(run_dir), goes_on=goes_on, shows_progress=False)
    except (OSError, ValueError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return MADE


def main() -> int:
    """Answers standard input's lines until it ends; returns the exit code."""
    run_dir = Path(sys.argv[1])
    signals = EndingSignals()
    try:
        with signals:
            for line in sys.stdin:
                # One write: an answer comes as a whole.
                sys.stdout.write(make(run_dir, goes_on=line.strip() == GOES_ON) + "\n")
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + (signals.received or signal.SIGINT)
    except BrokenPipeError:
        # Nobody waits for the answer any more.
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
