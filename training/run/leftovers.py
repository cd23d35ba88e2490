"""Ends what a run's environments, tools and rewards started, and did not end.

Such a process may have left its parent, its group and its session. It keeps a mark: a
program that was started has the environment variable that all of a run's processes on this machine
inherit; a process that was only forked shows the environment of its parent's start, and has the
parent's open file of that name.
"""

import logging
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from custom.verifier_process import end_verifier_processes

logger = logging.getLogger(__name__)
MARK = "PPO_CORE_RUN"
# For those that are ending by themselves.
GRACE_S = 1.0
# It ends by itself, when it has removed the shared memory that was left.
ENDS_BY_ITSELF = "multiprocessing.resource_tracker"
# So many are named.
MOST_NAMES = 5


@contextmanager
def ends_leftovers() -> Iterator[None]:
    """Marks what is started in the block, and ends what of it is left behind it."""
    mark = uuid.uuid4().hex
    before = os.environ.get(MARK)
    os.environ[MARK] = mark
    try:
        with _open_mark(mark):
            yield
    finally:
        end_verifier_processes()
        # An environment may have cleared them all.
        os.environ.pop(MARK, None)
        if before is not None:
            os.environ[MARK] = before
        _end_marked(mark)


@contextmanager
def _open_mark(mark: str) -> Iterator[None]:
    """Keeps a file in memory open that is named by the mark, where the system has such files."""
    if not hasattr(os, "memfd_create"):
        yield
        return
    file = os.memfd_create(f"{MARK}.{mark}")
    try:
        yield
    finally:
        os.close(file)


def _end_marked(mark: str) -> None:
    """Ends the processes that carry the mark, and says how many there were."""
    if not _marked(mark):
        return
    psutil.wait_procs(_marked(mark), timeout=GRACE_S)
    left = _marked(mark)
    names = []
    for process in left:
        with suppress(psutil.Error):
            names.append(f"{process.name()} ({process.pid})")
            process.kill()
    if names:
        more = ", …" if len(names) > MOST_NAMES else ""
        logger.warning(
            "%d processes that environments, tools or rewards had started outlived the run and "
            "were ended: %s%s",
            len(names),
            ", ".join(names[:MOST_NAMES]),
            more,
        )
    psutil.wait_procs(left, timeout=GRACE_S)


def _marked(mark: str) -> list[psutil.Process]:
    """Lists the processes that carry the mark and live, but those that end by themselves."""
    found = []
    # Not process_iter, which remembers processes: one that has an earlier one's number would be
    # named as that, and not be ended.
    for number in psutil.pids():
        # It may end meanwhile, or be another user's.
        with suppress(psutil.Error, OSError):
            process = psutil.Process(number)
            if number == os.getpid() or not _carries(process, mark):
                continue
            ends_by_itself = ENDS_BY_ITSELF in " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not ends_by_itself:
                found.append(process)
    return found


def _carries(process: psutil.Process, mark: str) -> bool:
    """Checks whether a process has the mark: in its environment, or as an open file."""
    if process.environ().get(MARK) == mark:
        return True
    files = Path(f"/proc/{process.pid}/fd")
    if not files.is_dir():
        return False
    return any(f"{MARK}.{mark}" in os.readlink(file) for file in files.iterdir())
