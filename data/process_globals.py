"""Puts right what a user's code, in a thread of the run's, has broken for the whole process.

Only what nobody can mean is put right: a hook that cannot be called, a stream that is gone. What
else such code sets (the current folder, random generators, the locale) is the process's from then
on, as docs/isolation.md says.
"""

import builtins
import contextlib
import os
import sys
import threading
from typing import Any

# Where a function stands, its name, and what it was when Python started: without the first two no
# thread starts any more, or no error is shown.
FUNCTIONS: tuple[tuple[Any, str, Any], ...] = (
    (threading, "excepthook", threading.excepthook),
    (sys, "excepthook", sys.__excepthook__),
    (sys, "unraisablehook", sys.__unraisablehook__),
    (builtins, "print", builtins.print),
)
# The streams, with their numbers.
STREAMS = (("stdout", 1), ("stderr", 2))


def mend_process_globals() -> list[str]:
    """Puts right what is broken; returns its names. May be called from any thread."""
    mended = []
    for module, name, original in FUNCTIONS:
        if not callable(getattr(module, name, None)):
            setattr(module, name, original)
            mended.append(f"{module.__name__}.{name}")
    for name, number in STREAMS:
        if is_gone(getattr(sys, name, None)):
            setattr(sys, name, open_stream(name, number))
            mended.append(f"sys.{name}")
    return mended


def is_gone(stream: Any) -> bool:
    """Checks whether a stream is none, or closed."""
    return stream is None or bool(getattr(stream, "closed", False))


def open_stream(name: str, number: int) -> Any:
    """Returns the stream with which Python started, or opens it again."""
    first = getattr(sys, f"__{name}__")
    if not is_gone(first):
        return first
    # Python closes the object alone, and leaves the file open.
    with contextlib.suppress(OSError):
        return open(number, "w", buffering=1, errors="backslashreplace", closefd=False)
    return open(os.devnull, "w")
