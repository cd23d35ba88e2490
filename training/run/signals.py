"""Ends a run by a signal: through its clean-up, after the step where that can be.

Invariant: however a run ends, but by SIGKILL, its clean-up runs once and whole.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, Self

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A scheduler may tell every process of a job, and the one that watches over this one hands it on:
# a SIGTERM that follows one within so many seconds is the same.
ECHO_S = 2.0
SIGNALS_READ = 4096


def set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Sets the handler of each signal, where this is the main thread; only that can."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def let_children_end() -> None:
    """Lets children of this process end without a word.

    Where a worker of a torch DataLoader is ended, torch's handler of SIGCHLD raises an error, in
    whatever the process is about. Once a run ends, that would take the place of what ended it.
    """
    set_handlers({signal.SIGCHLD: signal.SIG_DFL})


class SignalsSeen:
    """Knows which signals came in the block, whatever handlers were there and what became of them.

    In another thread than the main one, none.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._numbers = b""

    def __contains__(self, number: int) -> bool:
        with suppress(BlockingIOError):
            self._numbers += self._reader.recv(SIGNALS_READ)
        return number in self._numbers

    def __enter__(self) -> Self:
        self._previous = -1
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._previous)
        self._reader.close()
        self._writer.close()


def end_at_signals(code: int) -> None:
    """Lets a signal end the process at once, behind the run, with the run's exit code.

    A user's own threads, Ray and libraries in C may hold the process up for many seconds. A run
    that was well has 128 and the signal's number then, as one that is ended earlier.
    """

    def end(number: int, frame: FrameType | None) -> None:
        for stream in (sys.stdout, sys.stderr):
            # Nobody may read it, or it may be in the midst of being written.
            with suppress(Exception):
                stream.flush()
        os._exit(code or 128 + number)

    set_handlers(dict.fromkeys(ENDING_SIGNALS, end))


def ignore_late_signals() -> None:
    """Ignores a scheduler's signals where the process only has to give its memory back.

    No handler of Python's runs any more then, so that the exit code would be the signal's. Ctrl-C
    ends it all the same.
    """
    set_handlers({signal.SIGTERM: signal.SIG_IGN, signal.SIGHUP: signal.SIG_IGN})
    set_handlers({signal.SIGINT: signal.SIG_DFL})


class EndingSignals:
    """Turns Ctrl-C, SIGTERM and SIGHUP into KeyboardInterrupt, which runs the `finally` blocks.

    While `postpone()` is true the first of them only sets `received`, and the run ends by itself
    when its step is done; `step` says in a word what that is. A signal after `close` is ignored,
    since the clean-up takes but seconds and must be whole. A signal that is ignored already (nohup)
    stays so. As a context manager it gives the signals back at the end.
    """

    def __init__(self, postpone: Callable[[], bool] = lambda: False) -> None:
        self.received = 0
        self.open = True
        self.received_at = 0.0
        self.postpone = postpone
        self.step = "step"
        self.previous_handlers: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Takes the signals over; only the main thread can."""
        self.previous_handlers = {}
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if handler is not signal.SIG_IGN:
                self.previous_handlers[number] = handler
        set_handlers(dict.fromkeys(self.previous_handlers, self._end))

    def __enter__(self) -> Self:
        self.received = 0
        self.open = True
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        set_handlers(self.previous_handlers)

    def close(self) -> None:
        """Ignores what comes from now on; children may end."""
        self.open = False
        let_children_end()

    def _end(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_echo = number == signal.SIGTERM == self.received and now - self.received_at < ECHO_S
        if is_echo or not self.open:
            return
        # A scheduler may have told the children, too.
        let_children_end()
        ends_later = not self.received and self.postpone()
        self.received = number
        self.received_at = now
        how = "ending the run"
        if ends_later:
            how = f"ending the run after this {self.step}; once more: at once"
        # Nobody may read it any more: Ctrl-C has ended `tee`, say.
        with suppress(OSError):
            # Not print: the signal may have come in the midst of one.
            os.write(2, f"\n{signal.Signals(number).name}: {how}\n".encode())
        if not ends_later:
            raise KeyboardInterrupt


@contextmanager
def ended_by_a_closed_pipe() -> Iterator[None]:
    """Lets `| head` end this process without a word, as it ends other programs that print."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
