"""Functions of a user's that a pool of programs runs in environment homes, and awaits.

It belongs to the thread whose event loop makes it. Invariant: every job is replied to once, also
one that is given up.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply


class Buildable(Protocol):
    """The thing that an environment pool builds: here it has a method `run`."""

    @property
    def libraries(self) -> tuple[str, ...]: ...

    @property
    def source(self) -> Any: ...

    def build(self) -> Any: ...


# Makes an environment pool from the things to be built in it, with settings of its own.
HomesMaker = Callable[..., EnvironmentPool]


class Jobs:
    """Runs one function, many times at once.

    Args:
        spec: builds what has the method `run`.
        homes: makes the environment pool.
        has_deadline: each run has that of the pool's calls; otherwise someone else sees to it.
    """

    def __init__(self, spec: Buildable, homes: HomesMaker, *, has_deadline: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        settings: dict[str, Any] = {}
        if not has_deadline:
            settings = {"step_timeout_s": None, "episode_timeout_s": None}
        self._pool = homes([spec], **settings)
        self._waiting: dict[Any, asyncio.Future[StepReply]] = {}

    async def run(self, key: Any, *arguments: Any) -> StepReply:
        """Runs the function with these arguments; returns its reply."""
        future: asyncio.Future[StepReply] = self._loop.create_future()
        self._waiting[key] = future
        self._pool.run(key, 0, *arguments, answers=self)
        return await future

    def put(self, answer: tuple[Any, StepReply], /) -> None:
        """Takes a reply, from any thread."""
        self._loop.call_soon_threadsafe(self._take, *answer)

    def _take(self, key: Any, reply: StepReply) -> None:
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(reply)

    def give_up(self, key: Any) -> None:
        """Ends a run that takes too long."""
        self._pool.abandon(key, StepReply(failure="env_timeout", error="it was given up"))

    async def close(self) -> None:
        """Ends all that runs."""
        await asyncio.to_thread(self._pool.shutdown)
