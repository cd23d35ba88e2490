"""A thread that writes beside the run, in the order in which it is asked to.

Invariant: a disk that hangs holds the run up for WAIT_S seconds at most, once for each thing that
is to be written, and never keeps the process from ending.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

# So many jobs may wait, a step has two of them; then the run waits for the first.
MOST_WAITING = 4
# Seconds for which the run waits, for room in the queue or for its end.
WAIT_S = 60.0

Job = Callable[[], None]


class BackgroundWriter:
    """Runs jobs one after another, in a thread that begins with the first of them."""

    def __init__(self) -> None:
        # None ends the thread.
        self._jobs: queue.Queue[Job | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> bool:
        """Queues a job, which must not raise; returns whether there was room for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="records", daemon=True)
            self._thread.start()
        try:
            self._jobs.put(job, timeout=WAIT_S)
        except queue.Full:
            return False
        return True

    def flush(self) -> bool:
        """Waits until all that was queued is done; returns whether it is."""
        if self._thread is None:
            return True
        done = threading.Event()
        return self.submit(done.set) and done.wait(WAIT_S)

    def close(self) -> bool:
        """Waits as `flush` does, and ends the thread; returns whether all is done."""
        is_done = self.flush()
        if is_done and self._thread is not None:
            self._jobs.put(None)
            self._thread.join(WAIT_S)
            self._thread = None
        return is_done

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job()
