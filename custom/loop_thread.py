"""A thread with an event loop, for code of ours that asks servers: one in each process.

Callers have no loop (environments, reward functions and tools are plain functions) or one of their
own. Invariant: whatever a coroutine does, its caller gets its result or its error; a caller that
gives up (a deadline, Ctrl-C) cancels it.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# A deadline of the environment pool's ends a wait between two looks.
LOOK_S = 0.1


class LoopThread:
    """Runs coroutines in a daemon thread, which starts with the first; a fork starts its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and waits for its result."""
        future = self.submit(coroutine)
        try:
            while not future.done():
                concurrent.futures.wait([future], LOOK_S)
        finally:
            # This does nothing to one that is done.
            future.cancel()
        return future.result()

    async def run_from(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine for a caller with a loop of its own, which goes on meanwhile."""
        return await asyncio.wrap_future(self.submit(coroutine))

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                threading.Thread(
                    target=self._loop.run_forever, name="asks servers", daemon=True
                ).start()
            return self._loop


LOOP_THREAD = LoopThread()
