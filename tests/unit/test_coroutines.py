"""Coroutines are awaited in the thread that calls, in a loop that lasts; what hangs is given up."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import psutil
import pytest

from custom.coroutines import close_loop, finished

WORD: ContextVar[str] = ContextVar("word", default="")


class GivenUp(BaseException):
    """As the pool raises in a thread whose call is overdue."""


def in_thread(function: Any) -> Any:
    """Calls a function in a thread of its own, and returns what it returned or raised."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(function())
        except BaseException as error:
            made.append(error)
        finally:
            close_loop()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    return made[0]


async def loop_here() -> asyncio.AbstractEventLoop:
    await asyncio.sleep(0)
    return asyncio.get_running_loop()


def test_what_is_no_awaitable_is_returned_as_it_is() -> None:
    assert finished(3) == 3
    assert finished(None) is None


def test_a_thread_has_one_loop_and_each_thread_its_own() -> None:
    first, again = in_thread(lambda: (finished(loop_here()), finished(loop_here())))
    other = in_thread(lambda: finished(loop_here()))
    assert first is again and first is not other
    assert first.is_closed() and other.is_closed()


def test_errors_and_context_pass() -> None:
    async def raises() -> None:
        await asyncio.sleep(0)
        raise KeyError(WORD.get())

    WORD.set("here")
    with pytest.raises(KeyError, match="here"):
        finished(raises())
    close_loop()


@pytest.mark.parametrize("ended", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_program_passes_too_and_spoils_no_later_call(ended: type) -> None:
    async def ends() -> None:
        raise ended

    def call() -> Any:
        with pytest.raises(ended):
            finished(ends())
        return finished(loop_here())

    assert isinstance(in_thread(call), asyncio.AbstractEventLoop)


def test_a_loop_that_runs_may_call_what_awaits() -> None:
    WORD.set("outer")

    async def inner() -> tuple[str, Any]:
        await asyncio.sleep(0)
        return WORD.get(), asyncio.get_running_loop()

    async def outer() -> Any:
        return finished(inner()), asyncio.get_running_loop()

    (word, inner_loop), outer_loop = finished(outer())
    close_loop()
    assert word == "outer"
    assert inner_loop is not outer_loop and inner_loop.is_closed()


@pytest.mark.parametrize("beside", [False, True])
def test_a_call_that_hangs_is_given_up_and_its_coroutine_is_cancelled(beside: bool) -> None:
    told: list[str] = []
    began = threading.Event()

    async def hangs() -> None:
        try:
            began.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def nested() -> None:
        finished(hangs())

    threads: list[int] = []

    def call() -> None:
        threads.append(threading.get_ident())
        finished(nested() if beside else hangs())

    def give_up() -> None:
        began.wait(30)
        time.sleep(0.05)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threads[0]), ctypes.py_object(GivenUp)
        )

    threading.Thread(target=give_up).start()
    assert isinstance(in_thread(call), GivenUp)
    deadline = time.monotonic() + 10
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == ["cancelled"]


@pytest.mark.seconds
def test_what_refuses_to_end_is_left_to_itself() -> None:
    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    tasks: list[Any] = []

    async def leaves() -> None:
        tasks.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)

    begun = time.monotonic()
    in_thread(lambda: finished(leaves()))
    assert time.monotonic() - begun < 20


def test_loops_leave_no_open_files() -> None:
    before = psutil.Process(os.getpid()).num_fds()
    for _ in range(20):
        in_thread(lambda: finished(loop_here()))
    assert psutil.Process(os.getpid()).num_fds() <= before
