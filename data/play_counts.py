"""Counts what this process plays, and tells the driver where that is another process.

The turn loop counts (`PLAYED`); `training/run/progress.py` shows. A rank writes its numbers to the
store at which the ranks met, every `REPORT_S` seconds and only while it plays; the driver reads
all ranks' in one call. Invariant: the loop itself does no more than add whole numbers.
"""

import json
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

# Between two reports of a rank.
REPORT_S = 2.0
STORE_TIMEOUT = timedelta(seconds=5)


class Running(Protocol):
    """An episode that was begun.

    Attributes:
        started_at: of time.perf_counter, in seconds.
    """

    started_at: float


class Loop(Protocol):
    """Plays episodes; its `running` are those that were begun and have not ended, by number."""

    running: dict[int, Any]


@dataclass(frozen=True)
class Played:
    """Tells how far a generation is.

    Attributes:
        episodes: that are played together.
        ended: of them.
        tokens: sampled by this process so far, in all generations.
        oldest_s: for how long the slowest episode has run; 0: none runs.
    """

    episodes: int = 0
    ended: int = 0
    tokens: int = 0
    oldest_s: float = 0.0


class PlayCounts:
    """Counts in one process; there is one a process, `PLAYED`.

    Attributes:
        episodes: that were taken in and had not ended when the last were taken in.
        ended: since then.
        tokens: sampled; it counts on.
    """

    def __init__(self) -> None:
        self.episodes = 0
        self.ended = 0
        self.tokens = 0
        self._loop: weakref.ref[Any] | None = None

    def begin(self, loop: Loop, episodes: int) -> None:
        """Counts episodes that a loop takes in, beside those of its that have not ended."""
        self._loop = weakref.ref(loop)
        self.episodes += episodes - self.ended
        self.ended = 0

    def read(self) -> Played:
        """Returns the numbers as they are; any thread may."""
        loop = self._loop() if self._loop is not None else None
        oldest_s = 0.0
        if loop is not None:
            running: list[Running] = list(loop.running.values())
            if running:
                started_at = min(episode.started_at for episode in running)
                oldest_s = time.perf_counter() - started_at
        return Played(self.episodes, self.ended, self.tokens, oldest_s)


PLAYED = PlayCounts()


def add_up(parts: Iterable[Played]) -> Played:
    """Returns the numbers of several processes as one."""
    parts = list(parts)
    return Played(
        episodes=sum(part.episodes for part in parts),
        ended=sum(part.ended for part in parts),
        tokens=sum(part.tokens for part in parts),
        oldest_s=max((part.oldest_s for part in parts), default=0.0),
    )


def report_to(address: tuple[str, int], rank: int) -> None:
    """Begins to report this process's numbers, in a thread that ends with the store's host."""
    threading.Thread(target=_report, args=(address, rank), name="progress", daemon=True).start()


def _report(address: tuple[str, int], rank: int) -> None:
    # The store raises anything when its host has gone.
    with suppress(Exception):
        store = _join(address)
        reported: Played | None = None
        while True:
            now = PLAYED.read()
            if now != reported:
                numbers = [now.episodes, now.ended, now.tokens, now.oldest_s]
                store.set(_key(rank), json.dumps(numbers))
            reported = now
            time.sleep(REPORT_S)


class Reports:
    """Reads, in the driver, what the ranks report; there is one a process, `REPORTS`."""

    def __init__(self) -> None:
        self._addresses: list[tuple[tuple[str, int], int]] = []
        self._stores: dict[tuple[str, int], Any] = {}

    def add(self, address: tuple[str, int], ranks: int) -> None:
        """Adds so many ranks that report at this address; it is asked when somebody reads."""
        self._addresses.append((address, ranks))

    def clear(self) -> None:
        """Reads from nobody any more."""
        self._addresses = []
        self._stores = {}

    def read(self) -> Played:
        """Returns the numbers of all ranks, or, where there are none, of this process."""
        if not self._addresses:
            return PLAYED.read()
        parts: list[Played] = []
        for address, ranks in self._addresses:
            # Its host may be ending.
            with suppress(Exception):
                store = self._stores.get(address)
                if store is None:
                    store = self._stores[address] = _join(address)
                keys = [_key(rank) for rank in range(ranks)]
                if store.check(keys):
                    parts += [Played(*json.loads(value)) for value in store.multi_get(keys)]
        return add_up(parts)


REPORTS = Reports()


def _join(address: tuple[str, int]) -> Any:
    """Joins the store at which ranks report."""
    from torch.distributed import TCPStore

    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)


def _key(rank: int) -> str:
    return f"played/{rank}"
