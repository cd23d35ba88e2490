"""The pool that runs users' environments: many episodes at once, each call with a deadline, none holding up the rest.

A slot is one env worker with the thread of the pool that makes its calls. An episode holds a slot from `reset` to the
reply of its `finish`; the slot then serves the next episode of its spec. After a failure the slot is thrown away: its
agent is closed in the background, its env worker killed if that takes too long.

    reset/step/finish -> waiting (FIFO, num_workers at a time) -> slot's thread: worker.call -> replies -> poll
                                       watch thread: an overdue call is answered as env_timeout

Invariant: every accepted call gets exactly one StepReply, whatever user code does: that of the env worker or that of
the watch, whichever takes `slot.call` first under the lock; what a discarded slot's worker says later is dropped.
"""

import contextlib
import faulthandler
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from custom.agent import LONGEST_S, AgentSpec
from custom.confine import Limits
from custom.env import Abandoned, Task
from workers.environments.env_server import Call, StepReply, crashed
from workers.environments.env_worker import EnvWorker, ForkServer, Isolation, WorkerLost, make_worker, pickled

# The episode's key, and the reply.
Answer = tuple[Any, StepReply]
MAX_CLOSE_S = 5.0
BUILD_TIMEOUT_S = 120.0
# For one call within a trial, where calls have no deadline.
MAX_TRIAL_STEP_S = 120.0
# Where environments share the run's interpreter, the watch sets faulthandler's timer back every BEAT_S. Code other than
# Python that keeps the interpreter's lock stops the watch with all other threads; STALL_S later the timer, which needs
# no lock, writes to stderr where each of them stands.
BEAT_S, STALL_S = 1.0, 10.0
# How long after its deadline a call is ended: what comes till then is judged by the time that it took itself, which a
# busy pool, late to ask and late to read, does not lengthen.
GRACE_S = 0.25
# How much longer shutdown waits for the threads of env workers that were killed.
LAST_JOIN_S = {"thread": 0.5, "process": 5.0, "ray": 10.0}


class CannotBuild(ValueError):
    """Says which environments cannot be built, and why: one problem each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class PendingCall(NamedTuple):
    """Is one call on its way; `answer` takes its key and the reply."""

    key: Hashable
    kind: Call
    args: tuple[Any, ...]
    answer: Callable[[Answer], None]


@dataclass(eq=False)
class Slot:
    """Is one env worker, and the thread that makes its calls.

    Attributes:
        call: accepted and not yet answered.
        built: its agent is made.
        discarded: it serves no further episode.
        used_s: the environment's own time in this episode.
        started: of the running call.
        limit: of the running call, in seconds on the environment's own clock.
        deadline: the watch looks at the running call then, or has closing end; inf: never.
    """

    spec_index: int
    worker: EnvWorker
    thread: threading.Thread = field(init=False)
    inbox: SimpleQueue[PendingCall | None] = field(default_factory=SimpleQueue)
    call: PendingCall | None = None
    built: bool = False
    discarded: bool = False
    used_s: float = 0.0
    started: float = 0.0
    limit: float = math.inf
    deadline: float = math.inf


class EnvironmentPool(contextlib.AbstractContextManager["EnvironmentPool", None]):
    """Runs agents built from `specs`.

    Its owner's thread calls, and no call blocks but `poll`, `tool_schemas` and `shutdown`.

    Args:
        isolation: where environments live. A thread that hangs in code other than Python cannot be stopped, a process
            and a Ray actor can.
        num_workers: calls that run at once; None: as many as there are episodes. Waiting for one's turn counts for no
            deadline.
        step_timeout_s: the longest that one reset, step or finish may take; None: for ever.
        episode_timeout_s: the longest that an episode's reset and steps may take together, and its finish if
            step_timeout_s is None.
        build_timeout_s: the longest that making an agent may take, imports included; it is part of no episode.
        limits: what a process of an environment's may have.

    Deadlines count the environment's own time (`own_clock`): what it computes, and what it waits for; not the time for
    which a busy machine keeps it from running.

    Raises:
        ValueError: a spec does not pickle for another process.
    """

    def __init__(
        self,
        specs: Sequence[AgentSpec],
        *,
        isolation: Isolation = "thread",
        num_workers: int | None = None,
        step_timeout_s: float | None = None,
        episode_timeout_s: float | None = None,
        build_timeout_s: float = BUILD_TIMEOUT_S,
        limits: Limits | None = None,
    ) -> None:
        self.isolation = isolation
        bounds = (math.inf if bound is None else bound for bound in (num_workers, step_timeout_s, episode_timeout_s))
        self.num_workers, self.step_timeout_s, self.episode_timeout_s = bounds
        self.build_timeout_s, self.close_timeout_s = build_timeout_s, min(MAX_CLOSE_S, self.step_timeout_s)
        self._specs = list(specs) if isolation == "thread" else [pickled(spec) for spec in specs]
        self._names = [environment_name(spec.source) for spec in specs]
        self._fork_server = ForkServer((spec.environment for spec in specs), limits or Limits())
        self._schemas: dict[int, list[dict[str, Any]] | None] = {}
        self._replies: SimpleQueue[Answer] = SimpleQueue()
        # The watch waits on it for a deadline.
        self._lock = threading.Condition()
        # What follows is read and written under the lock; the slots are all whose threads live.
        self._slots: set[Slot] = set()
        self._free: list[list[Slot]] = [[] for _ in specs]
        self._episodes: dict[Hashable, Slot] = {}
        self._waiting: list[Slot] = []
        self._running: set[Slot] = set()
        self._next_look = math.inf
        self._closed = self._stopped = False
        self._watch_thread = threading.Thread(target=self._watch, name="environments", daemon=True)
        self._watch_thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def tool_schemas(self) -> list[list[dict[str, Any]] | None]:
        """Lists each spec's tools; builds one agent of each, which then waits for its first episode.

        Raises:
            CannotBuild: agents cannot be built; the pool is then shut down.
        """
        built: SimpleQueue[Answer] = SimpleQueue()
        with self._lock:
            self._check_open()
            missing = [index for index in range(len(self._specs)) if index not in self._schemas]
            for index in missing:
                self._submit(self._new_slot(index), PendingCall(index, "build", (), built.put))
        replies = sorted((built.get() for _ in missing), key=lambda answer: answer[0])
        if failed := [(key, reply) for key, reply in replies if reply.failure]:
            self.shutdown()
            raise CannotBuild([f"environment {self._names[key]} cannot be built: {r.error}" for key, r in failed])
        return [self._schemas[index] for index in range(len(self._specs))]

    def reset(self, key: Hashable, spec_index: int, seed: int, task: Task | None = None) -> None:
        """Starts an episode under a name of the caller's choice."""
        self._begin(key, spec_index, "reset", seed, task)

    def trial(
        self, key: Hashable, spec_index: int, seed: int, episodes: int, max_turn: int, task: Task | None = None
    ) -> None:
        """Has an agent play a few episodes by itself (custom/agent.py); it then waits for its first episode."""
        self._begin(key, spec_index, "trial", seed, episodes, max_turn, task)

    def step(self, key: Hashable, text: str) -> None:
        """Sends the policy's response."""
        self._continue(key, "step", text)

    def finish(self, key: Hashable, ending: str) -> None:
        """Ends an episode that has not failed."""
        self._continue(key, "finish", ending)

    def poll(self, timeout: float) -> list[Answer]:
        """Returns the replies since the last time; waits at most `timeout` seconds for the first."""
        replies: list[Answer] = []
        with contextlib.suppress(Empty):
            while True:
                replies.append(self._replies.get(timeout > 0 and not replies, timeout))
        return replies

    def shutdown(self) -> None:
        """Closes every environment, all at once, and kills what does not close in time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiting.clear()
            slots = list(self._slots)
            for slot in slots:
                slot.inbox.put(None)
                if not slot.discarded:
                    self._discard(slot)
        # The watch kills what has not closed by then.
        last = time.monotonic() + self.close_timeout_s + GRACE_S + LAST_JOIN_S[self.isolation]
        for slot in slots:
            slot.thread.join(max(0.0, last - time.monotonic()))
        with self._lock:
            self._stopped = True
            self._lock.notify()
        self._watch_thread.join()
        if self.isolation == "thread":
            faulthandler.cancel_dump_traceback_later()
        self._fork_server.stop()

    # The caller's side

    def _begin(self, key: Hashable, spec_index: int, kind: Call, *args: Any) -> None:
        with self._lock:
            self._check_open()
            if key in self._episodes:
                raise ValueError(f"episode {key!r} is still running; finish it first")
            free = self._free[spec_index]
            slot = self._episodes[key] = free.pop() if free else self._new_slot(spec_index)
            slot.used_s = 0.0
            self._submit(slot, PendingCall(key, kind, args, self._replies.put))

    def _continue(self, key: Hashable, kind: Call, *args: Any) -> None:
        with self._lock:
            self._check_open()
            slot = self._episodes.get(key)
            if slot is None or slot.call is not None:
                state = "is not running" if slot is None else "still waits for the reply to its last call"
                raise ValueError(f"{kind}: episode {key!r} {state}")
            self._submit(slot, PendingCall(key, kind, args, self._replies.put))

    # Under the lock

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the environment pool is shut down")

    def _submit(self, slot: Slot, call: PendingCall) -> None:
        slot.call = call
        self._waiting.append(slot)
        self._dispatch()

    def _dispatch(self) -> None:
        # Imports of many env workers at once would starve each other.
        builds = (os.cpu_count() or 1) - sum(not slot.built for slot in self._running)
        for slot in list(self._waiting):
            if len(self._running) < self.num_workers and (slot.built or builds > 0):
                builds -= not slot.built
                self._waiting.remove(slot)
                self._running.add(slot)
                slot.inbox.put(slot.call)

    def _new_slot(self, spec_index: int) -> Slot:
        slot = Slot(spec_index, make_worker(self.isolation, self._fork_server))
        slot.thread = threading.Thread(target=self._serve, args=(slot,), name="environment", daemon=True)
        self._slots.add(slot)
        slot.thread.start()
        return slot

    def _settle(self, slot: Slot, reply: StepReply) -> None:
        """Answers the slot's call and decides what becomes of the slot."""
        call = slot.call
        assert call is not None
        slot.used_s += reply.seconds
        self._put_down(slot)
        if reply.failure:
            self._discard(slot)
        elif call.kind in ("finish", "build", "trial"):
            self._free[slot.spec_index].append(slot)
        if reply.failure or call.kind in ("finish", "trial"):
            self._episodes.pop(call.key, None)
        self._dispatch()
        call.answer((call.key, reply))

    def _put_down(self, slot: Slot) -> None:
        self._running.discard(slot)
        slot.call, slot.deadline = None, math.inf

    def _discard(self, slot: Slot) -> None:
        self._put_down(slot)
        slot.discarded = True
        self._set_deadline(slot, self.close_timeout_s)

    def _set_deadline(self, slot: Slot, limit: float) -> None:
        slot.started, slot.limit = time.monotonic(), limit
        slot.deadline = slot.started + limit + GRACE_S
        if slot.deadline < self._next_look:
            self._lock.notify()

    # A slot's thread

    def _serve(self, slot: Slot) -> None:
        with contextlib.suppress(Abandoned):
            while not slot.discarded and (call := slot.inbox.get()) is not None:
                reply = self._run(slot, call)
                with self._lock:
                    if slot.call is call:
                        self._settle(slot, reply)
        with contextlib.suppress(Abandoned):
            slot.worker.end()
        with self._lock:
            self._slots.discard(slot)

    def _run(self, slot: Slot, call: PendingCall) -> StepReply:
        try:
            if not slot.built:
                built = self._build(slot, call)
                if built.failure or call.kind == "build":
                    return built
            limit = self._limit(slot, call.kind)
            self._start_clock(slot, call, limit)
            reply = slot.worker.call(call.kind, call.args)
            return reply if reply.seconds <= limit else overdue(call.kind, reply.seconds)
        except WorkerLost as lost:
            return crashed(str(lost), time.monotonic() - slot.started)

    def _build(self, slot: Slot, call: PendingCall) -> StepReply:
        self._start_clock(slot, call, self.build_timeout_s)
        built = slot.worker.call("build", (self._specs[slot.spec_index],))
        if not built.failure:
            with self._lock:
                slot.built, self._schemas[slot.spec_index] = True, built.tools
                self._dispatch()
        return built

    def _start_clock(self, slot: Slot, call: PendingCall, limit: float) -> None:
        with self._lock:
            if slot.call is not call:
                raise WorkerLost("discarded before the call began")
            self._set_deadline(slot, limit)

    def _limit(self, slot: Slot, kind: Call) -> float:
        """Returns the longest that the next call may take; inf: for ever."""
        step_s, episode_s = self.step_timeout_s, self.episode_timeout_s
        if kind == "trial":
            return LONGEST_S + (MAX_TRIAL_STEP_S if step_s == math.inf else step_s)
        if kind == "finish":
            return episode_s if step_s == math.inf else step_s
        return min(step_s, max(0.0, episode_s - slot.used_s))

    # The watch's thread

    def _watch(self) -> None:
        with self._lock:
            while not self._stopped:
                now = time.monotonic()
                for slot in [slot for slot in self._slots if slot.deadline <= now]:
                    self._overdue(slot, now)
                self._next_look = min((slot.deadline for slot in self._slots), default=math.inf)
                wait = min(self._next_look - time.monotonic(), threading.TIMEOUT_MAX)
                if self.isolation == "thread":
                    faulthandler.dump_traceback_later(STALL_S, file=2)
                    wait = min(wait, BEAT_S)
                self._lock.wait(wait if wait < threading.TIMEOUT_MAX else None)

    def _overdue(self, slot: Slot, now: float) -> None:
        # The worker had its time to close.
        if slot.call is None:
            slot.deadline = math.inf
            slot.worker.kill()
        # The machine kept it from running, or us from reading.
        elif (left := slot.limit + GRACE_S - slot.worker.ran()) > 0:
            slot.deadline = now + max(left, GRACE_S)
        else:
            self._settle(slot, overdue(slot.call.kind if slot.built else "build", now - slot.started))


def overdue(kind: Call, seconds: float) -> StepReply:
    """Makes the reply of a call that ran beyond its deadline."""
    text = f"{kind} was still running at its deadline, after {seconds:.3g} s"
    return StepReply(failure="env_timeout", error=text, seconds=seconds)


def environment_name(source: Any) -> str:
    """Returns what messages and metrics call it: textarena:GuessTheNumber-v0, or the name of a class."""
    if isinstance(source, str):
        return source.rsplit(":", 1)[-1] if source.partition(":")[0].endswith(".py") else source
    return getattr(source, "__name__", type(source).__name__)
