"""Holds a call on its way, and the slot whose env worker makes it."""

import math
import sys
import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol

from data.loading import is_users_file
from workers.environments.reply import Call, StepReply
from workers.environments.workers import EnvWorker

# The episode's key, and the reply.
Answer = tuple[Any, StepReply]


class Answers(Protocol):
    """Takes replies, from any thread; a queue is one."""

    def put(self, answer: Answer, /) -> None:
        """Takes one."""
        ...


@dataclass(eq=False)
class Slot:
    """Joins an env worker and the thread that makes its calls.

    Attributes:
        inbox: its calls; None ends the thread.
        call: the one that runs; None: none, or it was answered in the worker's place.
        built: its agent is made.
        served: the call that the thread makes, also where it was answered in the worker's place.
        kind: of the episode's call at hand; its answers are a part of it.
        part_s: the environment's own time in the parts of that call before this one.
        discarded: it serves no further episode.
        used_s: the environment's own time in this episode.
    """

    spec_index: int
    worker: EnvWorker
    thread: threading.Thread = field(init=False)
    inbox: "SimpleQueue[PendingCall | None]" = field(default_factory=SimpleQueue)
    call: "PendingCall | None" = None
    served: "PendingCall | None" = None
    kind: Call = "build"
    part_s: float = 0.0
    built: bool = False
    discarded: bool = False
    used_s: float = 0.0


@dataclass(eq=False, slots=True)
class PendingCall:
    """Holds a call on its way to the reply.

    Attributes:
        key: the episode's.
        answers: where the reply goes.
        behind: of a build, the episode's call that waits for it.
        limit: the longest that it may take on the environment's clock, in seconds.
        begun_at, look_at: when it began, and when the watch looks at it, of time.monotonic.
        is_new: it counts among those at their very beginning.
    """

    slot: Slot
    key: Hashable
    kind: Call
    args: tuple[Any, ...]
    answers: Answers
    behind: "PendingCall | None" = None
    limit: float = math.inf
    begun_at: float = 0.0
    look_at: float = math.inf
    is_new: bool = True


def users_line(thread: threading.Thread) -> str:
    """Returns FILE:LINE of the innermost line of a user's that a thread is in; "": of none."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
