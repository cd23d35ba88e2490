"""Keeps a run's process to the run: users' code may neither end it unseen nor double it.

`os._exit(0)` in a reward function, an observer or a thread's environment would end a run with the
exit code of one that came to its end; a child that such code forks, and that returns, would go on
as a second trainer. Invariant: the process that was started makes the steps, and nobody else; its
exit code is 0 only at the run's own end.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from data.loading import is_users_file

# The exit code where code ends a run with 0, or where a forked child comes back.
ENDED_EARLY = 1


@contextmanager
def exits_told() -> Iterator[None]:
    """Lets `os._exit` in the block say who called it, and never end this process with code 0.

    A forked child ends as it asks for: multiprocessing's and a user's own do.
    """
    real_exit = os._exit
    run_pid = os.getpid()

    def exit_told(status: int = 0) -> NoReturn:
        if os.getpid() == run_pid:
            place = _users_place()
            # The watchdog ends a run so, and has said why.
            if place or status == 0:
                _tell(
                    f"the run did not come to its end: os._exit({status}) was called "
                    f"{place or 'by a library'}; raise an error instead, or give the code a "
                    "process of its own"
                )
            status = status or ENDED_EARLY
        real_exit(status)

    os._exit = exit_told
    try:
        yield
    finally:
        os._exit = real_exit


def _users_place() -> str:
    """Says from where in a user's file this was called; "" where from none."""
    for frame in reversed(traceback.extract_stack()):
        if is_users_file(frame.filename):
            return f"in {Path(frame.filename)}:{frame.lineno}"
    return ""


@contextmanager
def one_process(what: str) -> Iterator[None]:
    """Ends a child that code in the block forked, where it leaves the block; the run goes on.

    Args:
        what: whose code the block runs, as the sentence on it calls it.
    """
    run_pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != run_pid:
            _tell(
                f"{what} forked, and its child returned into the run: the child (process "
                f"{os.getpid()}) is ended, the run goes on; end it by os._exit() in your code"
            )
            # The parent writes what is buffered.
            os._exit(ENDED_EARLY)


def _tell(sentence: str) -> None:
    """Writes to the standard error by itself: a log's lock may be held by another thread."""
    with suppress(OSError, ValueError):
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{sentence}\n".encode())
