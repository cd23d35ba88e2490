"""Computes something in a process of its own: what it leaves in globals reaches no other.

Invariant: however that process ends, the caller goes on, and learns how it ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Seconds, behind which a process has hung.
LIMIT = 1800


@dataclass(frozen=True)
class Answer:
    """Holds what a process computed, or why it computed nothing.

    Attributes:
        value: what was returned, as JSON knows it.
        raised: the name of the exception's class; empty where nothing was raised.
        said: the exception's sentence, or how the process died.
    """

    value: dict[str, Any] = field(default_factory=dict)
    raised: str = ""
    said: str = ""

    @property
    def came(self) -> bool:
        """Checks whether there is a value."""
        return not self.said


def in_own_process(compute: Callable[[], dict[str, Any]], limit: int = LIMIT) -> Answer:
    """Computes in a process of its own, which is ended behind so many seconds."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        # Whatever happens, the parent's code is not gone on with, nor are its cleanups.
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(limit)
            with open(writing, "wb") as stream:
                stream.write(json.dumps(_answer(compute)).encode())
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as stream:
        content = stream.read()
    _, status = os.waitpid(child, 0)
    if content:
        return Answer(**json.loads(content))
    return Answer(raised="Died", said=_death(status, limit))


def _answer(compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return {"value": compute()}
    # Whatever is raised is what is told.
    except BaseException as error:
        name = type(error).__name__
        return {"raised": name, "said": " ".join(str(error).split()) or name}


def _death(status: int, limit: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"its process ended with exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    if number == signal.SIGALRM:
        return f"its process was not done behind {limit} seconds"
    return f"its process was ended by {signal.Signals(number).name}"
