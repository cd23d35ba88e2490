"""Awaits what an `async def` of a user's returns: of an environment, a tool, a reward function.

    finished(environment.step(action))      # the same for a `def` and for an `async def`

A thread that makes calls has an event loop of its own, and an environment lives in one thread: what
its methods open in the loop, such as a client's connections, is there in its next call. Tasks that
a call leaves behind go on while the next one runs. Invariant: a call that is given up
(`Abandoned`) is never waited for, and its coroutine is cancelled.
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from contextlib import suppress
from contextvars import copy_context
from typing import Any

# A call that waits looks so often whether it was given up, in seconds.
LOOK_S = 0.1
# So long do tasks that are cancelled have to end.
MAX_CANCEL_S = 1.0


def finished(answer: Any) -> Any:
    """Returns what a function returned, and what it gives once it is awaited, if it is awaitable.

    It waits in the thread's own event loop. Where a loop runs here already, whose code has called a
    function of ours, it waits in a thread of its own, and that loop stands still.
    """
    if not inspect.isawaitable(answer):
        return answer
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _loop_of_thread().run(answer)
    return _run_beside(answer)


def close_loop() -> None:
    """Ends the event loop of this thread, where it has one, with the tasks that are left in it."""
    own: OwnLoop | None = getattr(_LOOPS, "own", None)
    _LOOPS.own = None
    if own is not None:
        own.close()


class OwnLoop:
    """Runs awaitables one after the other, in the event loop of a thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._note)
        # What was raised in a callback and ends the call that runs.
        self._raised: BaseException | None = None
        self._task: asyncio.Task[Any] | None = None

    def run(self, awaitable: Awaitable[Any]) -> Any:
        """Returns what an awaitable gives; raises what it raises."""
        self._raised = None
        task = self._loop.create_task(_awaited(awaitable))
        self._task = task
        self._wake_up()
        try:
            return self._loop.run_until_complete(task)
        finally:
            self._wakes_up.cancel()
            # One that is given up ends when the loop runs again.
            task.cancel()
            if self._raised is not None:
                raise self._raised

    def give_up(self) -> None:
        """Cancels what runs; may be called from any thread."""
        # The loop may have ended meanwhile.
        with suppress(RuntimeError):
            if self._task is not None:
                self._loop.call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        """Cancels what is left, and closes the loop; a task that does not end is left to itself."""
        # A forked child has the parent's loop in its hands, whose files they share.
        if self.pid != os.getpid() or self._loop.is_closed():
            return
        try:
            self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _wake_up(self) -> None:
        """Has the thread run some Python now and then, in which it can be told to give up."""
        self._wakes_up = self._loop.call_later(LOOK_S, self._wake_up)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Ends the call where a callback was hit by what ends a thread, which asyncio only logs."""
        error = context.get("exception")
        if "handle" in context and not isinstance(error, Exception):
            self._raised = error
            loop.stop()
            return
        loop.default_exception_handler(context)


# `own` is the loop of the thread that reads it.
_LOOPS = threading.local()


def _loop_of_thread() -> OwnLoop:
    """Returns the loop of this thread, and makes it with the first call."""
    own: OwnLoop | None = getattr(_LOOPS, "own", None)
    if own is None or own.pid != os.getpid():
        # A forked child keeps the parent's, so that nothing closes it.
        _LOOPS.inherited = own
        own = OwnLoop()
        _LOOPS.own = own
    return own


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _cancel_all() -> None:
    """Cancels all tasks but this one, and gives them a while to end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=MAX_CANCEL_S)


def _run_beside(awaitable: Awaitable[Any]) -> Any:
    """Awaits in a thread of its own, with this one's context."""
    results: list[Any] = []
    errors: list[BaseException] = []
    own = OwnLoop()

    def run() -> None:
        try:
            results.append(own.run(awaitable))
        # Whatever it is, it is raised again where it was waited for.
        except BaseException as error:
            errors.append(error)
        finally:
            with suppress(Exception):
                own.close()

    thread = threading.Thread(target=copy_context().run, args=(run,), name="awaits", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(LOOK_S)
    except BaseException:
        own.give_up()
        raise
    if errors:
        raise errors[0]
    return results[0]
