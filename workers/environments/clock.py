"""A clock of what an environment does, without the time for which a busy machine holds it up."""

import time


def task_clock(task: str | None = "thread-self") -> float:
    """Returns the seconds on a clock that stands still while a thread waits for a processor.

    It runs while the thread computes, and while the thread waits for something of its own.

    Args:
        task: the thread, by its folder in Linux's /proc: the calling one, or "PID", or
            "self/task/THREAD_ID". None, and where there is no such file: the wall's clock.
    """
    if task is None:
        return time.monotonic()
    try:
        with open(f"/proc/{task}/schedstat") as file:
            now = time.monotonic()
            # Nanoseconds for which the thread was ready to run and did not.
            waited_ns = int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return time.monotonic()
    return now - waited_ns / 1e9
