"""Puts right what a user's code, in a thread of the run's, has broken for the whole process.

Only what nobody can mean is put right: a hook that cannot be called, a stream that is gone,
warnings that are raised in whatever runs beside it. What else such code sets (the current folder,
random generators, the locale) is the process's from then on, as docs/isolation.md says.
"""

import builtins
import contextlib
import os
import sys
import threading
import warnings
from typing import Any, cast

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
# What warnings became when this was imported, as `python -W` and PYTHONWARNINGS say.
FILTERS_AT_START = tuple(warnings.filters)


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
    if drop_error_filters():
        mended.append("warnings.filters")
    return mended


def drop_error_filters() -> bool:
    """Takes back `warnings.simplefilter("error")` and the like, and says whether there was one.

    What torch and this project warn of, in a save or an update, would be raised there and end the
    run. Those with which Python started stay: whoever starts it may mean them.
    """
    filters = cast(list[Any], warnings.filters)
    added = [each for each in filters if each[0] == "error" and each not in FILTERS_AT_START]
    for each in added:
        # Another thread may have done so.
        with contextlib.suppress(ValueError):
            filters.remove(each)
    return bool(added)


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
