"""A clock of what an environment does, without the time for which a busy machine holds it up."""

import math
import os
import time
from contextlib import suppress

# A call that took no longer is short of any limit: its wait for a processor is not looked up.
SHORT_S = 0.005
# How old a look at what a task waited may be and still stand for the beginning of a call, where
# many threads share an interpreter and each look hands it over.
STALE_S = 1.0


def waited_for_processor(task: str) -> float:
    """Returns the seconds for which a task was ready to run and did not, since it began.

    Args:
        task: its folder in Linux's /proc: "PID", or "self/task/THREAD_ID"; 0 where there is no
            such file.
    """
    with suppress(OSError, ValueError, IndexError):
        file = os.open(f"/proc/{task}/schedstat", os.O_RDONLY)
        try:
            # Nanoseconds on a processor, and ready for one.
            return int(os.read(file, 100).split()[1]) / 1e9
        finally:
            os.close(file)
    return 0.0


class TaskClock:
    """Times the calls of a task; it stands still while the task waits for a processor.

    It runs while the task computes, and while it waits for something of its own. The task's
    waiting is looked up before a call, unless the last look is younger than `stale_s`, and behind
    one that was not short. Waiting between a look and the call is taken for the call's: a
    call so seems shorter, never longer.
    """

    def __init__(self, stale_s: float = 0.0) -> None:
        self._stale_s = stale_s
        self._task: str | None = None
        # When the running call began; inf: none runs.
        self._began = math.inf
        # How long the task had waited at the last look, and the time of that look.
        self._waited = 0.0
        self._looked_at = -math.inf

    def begin(self, task: str | None) -> None:
        """Begins to time a call of a task (see `waited_for_processor`); None: by the wall's clock.

        May be called from the thread alone that makes the call.
        """
        now = time.monotonic()
        if task is not None and (task != self._task or now - self._looked_at > self._stale_s):
            self._waited = waited_for_processor(task)
            self._looked_at = now
        self._task = task
        self._began = time.monotonic()

    def elapsed(self) -> float:
        """Returns the seconds since the running call began; 0 where none runs.

        May be called from any thread.
        """
        task = self._task
        wall = time.monotonic() - self._began
        if task is None or wall < SHORT_S:
            return max(0.0, wall)
        waited = waited_for_processor(task) - self._waited
        return max(0.0, wall - max(0.0, waited))

    def end(self) -> float:
        """Ends the call; returns its seconds."""
        wall = time.monotonic() - self._began
        self._began = math.inf
        if self._task is None or wall < SHORT_S:
            return max(0.0, wall)
        before = self._waited
        self._waited = waited_for_processor(self._task)
        self._looked_at = time.monotonic()
        return max(0.0, wall - max(0.0, self._waited - before))
