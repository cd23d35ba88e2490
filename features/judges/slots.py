"""The limit on requests at once: in this process, and over all processes of a machine.

Each request of a run holds the lock of one of `limit` files, which the kernel gives back however
the process ends. Invariant: no two requests hold one file; where files cannot be locked, the limit
holds for each process.
"""

import asyncio
import fcntl
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from data.warn_once import warn_once

# Seconds between two looks for a file that is free, at first and at most.
FIRST_LOOK_S = 0.005
LONGEST_LOOK_S = 0.2


class Slots:
    """Lets `limit` requests run at once; made and used in one event loop."""

    def __init__(self, limit: int, folder: Path | None) -> None:
        self._here = asyncio.Semaphore(limit)
        self._limit = limit
        self._folder = folder

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a request's turn, first come first served within this process."""
        async with self._here:
            lock = await self._lock_a_file()
            try:
                yield
            finally:
                if lock is not None:
                    os.close(lock)

    async def _lock_a_file(self) -> int | None:
        """Returns an open file that this request has locked; None where that is not possible."""
        if self._folder is None:
            return None
        wait_s = FIRST_LOOK_S
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                lock = self._try_files()
                if lock is not None:
                    return lock
                # Not all processes at once.
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, LONGEST_LOOK_S)
        except OSError as error:
            warn_once(__name__, f"{self._folder}: each process counts its requests alone: {error}")
            self._folder = None
            return None

    def _try_files(self) -> int | None:
        """Locks one of the files that are free; None: there is none."""
        assert self._folder is not None
        first = random.randrange(self._limit)
        for number in range(self._limit):
            name = str((first + number) % self._limit)
            file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            except OSError:
                os.close(file)
                raise
            return file
        return None
