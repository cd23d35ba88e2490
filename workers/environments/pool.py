"""The pool that runs users' environments: many episodes at once, each call with a deadline, none holding up the rest.

A slot is one env worker with the thread of the pool that makes its calls. An episode holds a slot from `reset` to the
reply of its `finish`; the slot then serves the next episode of its spec. After a failure the slot is thrown away: its
agent is closed in the background, its env worker killed if that takes too long.

    reset/step/finish -> waiting (FIFO, num_workers at a time) -> slot's thread: worker.call -> replies -> poll
                                       watch thread: an overdue call is answered as env_timeout

Invariant: every accepted call gets exactly one StepReply, whatever user code does: that of the env worker or that of
the watch, whichever takes `slot.call` first under the lock; what a discarded slot's worker says later is dropped.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from custom.confine import Limits
from custom.env import Abandoned
from custom.trial import LONGEST_S
from workers.environments.env_server import Call, StepReply, crashed
from workers.environments.env_worker import EnvWorker, Isolation, make_worker, pickled
from workers.environments.fork_server import ForkServer, WorkerLost, libraries_of
from workers.environments.sentry import Sentry

if TYPE_CHECKING:
    from custom.agent import AgentSpec

# The episode's key, and the reply.
Answer = tuple[Any, StepReply]
MAX_CLOSE_S = 5.0
BUILD_TIMEOUT_S = 120.0
# For one call within a trial, where calls have no deadline.
MAX_TRIAL_STEP_S = 120.0
# How often the sentry hears of the watch.
BEAT_S = 1.0
# How long after its deadline a call is ended: what comes till then is judged by the time that it took itself, which a
# busy pool, late to ask and late to read, does not lengthen.
GRACE_S = 0.25
# How long shutdown waits for the threads of env workers that were killed.
LAST_JOIN_S = {"thread": 0.5, "process": 5.0, "ray": 10.0}


class CannotBuild(ValueError):
    """Says which environments cannot be built, and why: one problem each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(eq=False)
class PendingCall:
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
        running: it holds one of the num_workers permits.
        building: it holds one of the permits to build.
        discarded: it serves no further episode.
        hung: it overran a deadline.
        used_s: the environment's own time in this episode.
        started: of the running call.
        limit: of the running call, in seconds on the environment's own clock.
        deadline: the watch looks at the running call then, or has closing end.
    """

    spec_index: int
    worker: EnvWorker
    thread: threading.Thread = field(init=False)
    inbox: SimpleQueue[PendingCall | None] = field(default_factory=SimpleQueue)
    call: PendingCall | None = None
    running: bool = False
    building: bool = False
    built: bool = False
    discarded: bool = False
    hung: bool = False
    used_s: float = 0.0
    started: float = 0.0
    limit: float | None = None
    deadline: float | None = None


class EnvironmentPool:
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
        ValueError: a setting is out of range, a spec does not pickle for another process, Ray is not running.
    """

    def __init__(
        self,
        specs: Sequence[AgentSpec],
        *,
        isolation: Isolation = "thread",
        num_workers: int | None = None,
        step_timeout_s: float | None = None,
        episode_timeout_s: float | None = None,
        build_timeout_s: float | None = BUILD_TIMEOUT_S,
        limits: Limits | None = None,
    ) -> None:
        check_settings(isolation, num_workers, step_timeout_s, episode_timeout_s)
        self.isolation = isolation
        self.num_workers = math.inf if num_workers is None else num_workers
        self.step_timeout_s, self.episode_timeout_s = step_timeout_s, episode_timeout_s
        self.build_timeout_s = build_timeout_s
        self.close_timeout_s = min(MAX_CLOSE_S, step_timeout_s or MAX_CLOSE_S)
        self._specs = list(specs) if isolation == "thread" else [pickled(spec) for spec in specs]
        self._names = [environment_name(spec.environment) for spec in specs]
        self._fork_server = ForkServer(libraries_of(spec.environment for spec in specs), limits)
        self._sentry: Sentry | None = None
        # Imports of many env workers at once would starve each other.
        self._builders = threading.Semaphore(os.cpu_count() or 1)
        self._schemas: dict[int, list[dict[str, Any]] | None] = {}
        self._replies: SimpleQueue[Answer] = SimpleQueue()
        lock = threading.RLock()
        self._lock, self._look, self._ended = lock, threading.Condition(lock), threading.Condition(lock)
        # What follows is read and written under the lock; the slots are all whose threads live.
        self._slots: set[Slot] = set()
        self._free: list[list[Slot]] = [[] for _ in specs]
        self._episodes: dict[Hashable, Slot] = {}
        self._waiting: deque[Slot] = deque()
        self._running = 0
        self._next_look = math.inf
        self._closed = self._stopped = False
        self._watch_thread = threading.Thread(target=self._watch, name="environments", daemon=True)
        self._watch_thread.start()

    def __enter__(self) -> EnvironmentPool:
        return self

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

    @property
    def leaked_threads(self) -> int:
        """Counts the threads that hang in an environment; one that comes back closes its environment and ends."""
        with self._lock:
            return sum(s.hung and s.thread.is_alive() for s in self._slots) if self.isolation == "thread" else 0

    def reset(self, key: Hashable, spec_index: int, seed: int) -> None:
        """Starts an episode under a name of the caller's choice."""
        with self._lock:
            self._submit(self._take_slot(key, spec_index), PendingCall(key, "reset", (seed,), self._replies.put))

    def trial(self, key: Hashable, spec_index: int, seed: int, episodes: int, max_turn: int) -> None:
        """Has an agent play a few episodes by itself (custom/trial.py); it then waits for its first episode."""
        with self._lock:
            call = PendingCall(key, "trial", (seed, episodes, max_turn), self._replies.put)
            self._submit(self._take_slot(key, spec_index), call)

    def step(self, key: Hashable, text: str) -> None:
        """Sends the policy's response."""
        self._continue(PendingCall(key, "step", (text,), self._replies.put))

    def finish(self, key: Hashable, ending: str) -> None:
        """Ends an episode that has not failed."""
        self._continue(PendingCall(key, "finish", (ending,), self._replies.put))

    def poll(self, timeout: float) -> list[Answer]:
        """Returns the replies since the last time; waits at most `timeout` seconds for the first."""
        replies = []
        with contextlib.suppress(Empty):
            replies.append(self._replies.get(timeout=timeout) if timeout > 0 else self._replies.get_nowait())
            while True:
                replies.append(self._replies.get_nowait())
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
            # Each slot has a deadline until it has ended or was killed.
            self._ended.wait_for(lambda: all(slot.deadline is None for slot in self._slots), self.close_timeout_s + 5)
            self._stopped = True
            self._look.notify()
        self._watch_thread.join()
        if self._sentry is not None:
            self._sentry.stop()
        last = time.monotonic() + LAST_JOIN_S[self.isolation]
        for slot in slots:
            slot.thread.join(max(0.0, last - time.monotonic()))
        self._fork_server.stop()

    # The caller's side, under the lock

    def _take_slot(self, key: Hashable, spec_index: int) -> Slot:
        self._check_open()
        if key in self._episodes:
            raise ValueError(f"episode {key!r} is still running; finish it first")
        if self.isolation == "thread" and self._sentry is None:
            self._sentry = Sentry()
            self._look.notify()
        free = self._free[spec_index]
        slot = free.pop() if free else self._new_slot(spec_index)
        slot.used_s = 0.0
        self._episodes[key] = slot
        return slot

    def _continue(self, call: PendingCall) -> None:
        with self._lock:
            self._check_open()
            slot = self._episodes.get(call.key)
            if slot is None or slot.call is not None:
                state = "is not running" if slot is None else "still waits for the reply to its last call"
                raise ValueError(f"{call.kind}: episode {call.key!r} {state}")
            self._submit(slot, call)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the environment pool is shut down")

    def _submit(self, slot: Slot, call: PendingCall) -> None:
        slot.call = call
        self._waiting.append(slot)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._waiting and self._running < self.num_workers:
            slot = self._waiting.popleft()
            slot.running = True
            self._running += 1
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
        self._end_building(slot)
        self._running -= slot.running
        slot.running, slot.call, slot.deadline, slot.limit = False, None, None, None

    def _discard(self, slot: Slot) -> None:
        self._put_down(slot)
        slot.discarded = True
        self._set_deadline(slot, self.close_timeout_s)

    def _set_deadline(self, slot: Slot, limit: float | None) -> None:
        slot.started, slot.limit = time.monotonic(), limit
        slot.deadline = None if limit is None else slot.started + limit + GRACE_S
        if slot.deadline is not None and slot.deadline < self._next_look:
            self._look.notify()

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
            self._ended.notify_all()

    def _run(self, slot: Slot, call: PendingCall) -> StepReply:
        try:
            if not slot.built:
                built = self._build(slot, call)
                if built.failure or call.kind == "build":
                    return built
            limit = self._limit(slot, call.kind)
            self._start_clock(slot, call, limit)
            with self._watched(slot, call.kind):
                reply = slot.worker.call(call.kind, call.args)
            return reply if limit is None or reply.seconds <= limit else overdue(call.kind, reply.seconds)
        except WorkerLost as lost:
            return crashed(str(lost), time.monotonic() - slot.started)

    def _build(self, slot: Slot, call: PendingCall) -> StepReply:
        self._builders.acquire()
        with self._lock:
            slot.building = True
            try:
                self._start_clock(slot, call, self.build_timeout_s)
            except WorkerLost:
                self._end_building(slot)
                raise
        with self._watched(slot, "build"):
            built = slot.worker.call("build", (self._specs[slot.spec_index],))
        with self._lock:
            self._end_building(slot)
        if not built.failure:
            slot.built = True
            self._schemas[slot.spec_index] = built.tools
        return built

    def _watched(self, slot: Slot, kind: Call) -> AbstractContextManager[None]:
        """Has the sentry know of the call."""
        if self._sentry is None:
            return contextlib.nullcontext()
        return self._sentry.watching(f"{kind} of {self._names[slot.spec_index]}", threading.get_native_id())

    def _end_building(self, slot: Slot) -> None:
        # Only once: a build that hangs gives its permit back at its deadline.
        if slot.building:
            slot.building = False
            self._builders.release()

    def _start_clock(self, slot: Slot, call: PendingCall, limit: float | None) -> None:
        with self._lock:
            if slot.call is not call:
                raise WorkerLost("discarded before the call began")
            self._set_deadline(slot, limit)

    def _limit(self, slot: Slot, kind: Call) -> float | None:
        """Returns the longest that the next call may take."""
        step_s, episode_s = self.step_timeout_s, self.episode_timeout_s
        if kind == "trial":
            return LONGEST_S + (step_s or MAX_TRIAL_STEP_S)
        if episode_s is None or kind == "finish":
            return episode_s if step_s is None else step_s
        rest = max(0.0, episode_s - slot.used_s)
        return rest if step_s is None else min(step_s, rest)

    # The watch's thread

    def _watch(self) -> None:
        with self._lock:
            while not self._stopped:
                now = time.monotonic()
                for slot in list(self._slots):
                    if slot.deadline is not None and slot.deadline <= now:
                        self._overdue(slot, now)
                deadlines = [slot.deadline for slot in self._slots if slot.deadline is not None]
                self._next_look = min(deadlines, default=math.inf)
                self._ended.notify_all()
                wait = min(self._next_look - time.monotonic(), threading.TIMEOUT_MAX)
                if self._sentry is not None:
                    self._sentry.beat()
                    wait = min(wait, BEAT_S)
                self._look.wait(wait if wait < threading.TIMEOUT_MAX else None)

    def _overdue(self, slot: Slot, now: float) -> None:
        # The worker had its time to close.
        if slot.call is None:
            slot.deadline, slot.hung = None, True
            slot.worker.kill()
            return
        assert slot.limit is not None
        left = slot.limit + GRACE_S - slot.worker.ran()
        if left > 0 or slot.worker.has_answered():
            # The machine kept it from running, or us from reading.
            slot.deadline = now + max(left, GRACE_S)
            return
        slot.hung = True
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


def check_settings(
    isolation: str, num_workers: int | None, step_timeout_s: float | None, episode_timeout_s: float | None
) -> None:
    """Raises ValueError where a pool cannot be made of these."""
    if isolation not in ("thread", "process", "ray"):
        raise ValueError(f"isolation={isolation!r} is unknown; allowed: thread, process, ray")
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers={num_workers}; allowed: 1 and more, or null for no limit")
    for name, limit in (("step_timeout_s", step_timeout_s), ("episode_timeout_s", episode_timeout_s)):
        if limit is not None and not limit > 0:
            raise ValueError(f"{name}={limit}; allowed: seconds above 0, or null for no deadline")
    if isolation == "ray":
        import ray

        if not ray.is_initialized():
            raise ValueError(
                "isolation=ray needs Ray, which is not running: trainer.launcher=ray, or isolation=process"
            )
