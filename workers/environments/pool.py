"""The pool that runs users' environments.

Many episodes run at once, each call with a deadline, and none holds up the rest. A slot is one env
worker with the thread of the pool that makes its calls. An episode holds a slot from `reset` to the
reply of its `finish`; the slot then serves the next episode of its spec. After a failure the slot
is thrown away: its agent is closed in the background, its env worker killed if that takes too long.

    caller's thread   reset/step/finish                                               poll
    an event loop's   `_answer`: waits for a permit (num_workers at a time, FIFO)     -> replies
    the slot's        `_serve`: worker.call -- or, at the call's deadline, env_timeout --^

Invariant: every accepted call gets exactly one StepReply, whatever user code does: `_answer` is one
coroutine a call, and puts out that of the env worker or that of the deadline; what a discarded
slot's worker replies later is dropped.
"""

import asyncio
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from custom.agent import AgentSpec
from custom.confine import Limits
from custom.env import Task
from custom.env_calls import Abandoned
from custom.trial import MAX_TRIAL_S
from workers.environments.fork_server import ForkServer
from workers.environments.reply import Call, StepReply, WorkerLost, crashed, overdue
from workers.environments.workers import EnvWorker, Isolation, make_worker, pickled

# The episode's key, and the reply.
Answer = tuple[Any, StepReply]
# A call on its way to a slot's thread: the future of its reply, its kind, its arguments.
PendingCall = tuple[asyncio.Future[StepReply], Call, tuple[Any, ...]]

# The longest that closing an agent may take.
MAX_CLOSE_S = 5.0
# The longest that making an agent may take, imports included; it is part of no episode.
BUILD_TIMEOUT_S = 120.0
# For one call within a trial, where calls have no deadline.
MAX_TRIAL_STEP_S = 120.0
# How long after its deadline a call is ended: what comes till then is judged by the time that it
# took itself, which a busy pool, late to ask and late to read, does not lengthen.
GRACE_S = 0.25
# How much longer shutdown waits for the threads of env workers that were killed.
LAST_JOIN_S = {"thread": 0.5, "process": 5.0, "ray": 10.0}


class CannotBuild(ValueError):
    """Lists the environments that cannot be built, and why: one problem each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(eq=False)
class Slot:
    """Joins an env worker and the thread that makes its calls.

    Attributes:
        inbox: its calls; None ends the thread.
        built: its agent is made.
        discarded: it serves no further episode.
        used_s: the environment's own time in this episode.
    """

    spec_index: int
    worker: EnvWorker
    thread: threading.Thread = field(init=False)
    inbox: SimpleQueue[PendingCall | None] = field(default_factory=SimpleQueue)
    built: bool = False
    discarded: bool = False
    used_s: float = 0.0


class EnvironmentPool(contextlib.AbstractContextManager["EnvironmentPool", None]):
    """Runs agents built from `specs`.

    Its owner's thread calls, and no call blocks but `poll`, `tool_schemas` and `shutdown`.

    Args:
        isolation: where environments live. A thread that hangs in code other than Python cannot be
            stopped, a process and a Ray actor can.
        num_workers: calls that run at once; None: as many as there are episodes. Waiting for one's
            turn counts for no deadline.
        step_timeout_s: the longest that one reset, step or finish may take; None: for ever.
        episode_timeout_s: the longest that an episode's reset and steps may take together, and its
            finish if step_timeout_s is None.
        limits: what a process of an environment's may have.

    Deadlines count the environment's own time (`task_clock`): what it computes, and what it waits
    for; not the time for which a busy machine keeps it from running.

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
        limits: Limits | None = None,
    ) -> None:
        self.isolation = isolation
        self.step_timeout_s = math.inf if step_timeout_s is None else step_timeout_s
        self.episode_timeout_s = math.inf if episode_timeout_s is None else episode_timeout_s
        self.close_timeout_s = min(MAX_CLOSE_S, self.step_timeout_s)
        self._specs: list[AgentSpec] | list[bytes] = list(specs)
        if isolation != "thread":
            self._specs = [pickled(spec) for spec in specs]
        self._names = [environment_name(spec.source) for spec in specs]
        self._fork_server = ForkServer((spec.environment for spec in specs), limits or Limits())
        self._schemas: dict[int, list[dict[str, Any]] | None] = {}
        self._replies: SimpleQueue[Answer] = SimpleQueue()
        # The slots whose threads live; nobody kills a worker whose thread has left them.
        self._slots: set[Slot] = set()
        self._lock = threading.Lock()
        # The slots of each spec that wait for an episode.
        self._free: list[list[Slot]] = [[] for _ in specs]
        self._episodes: dict[Hashable, Slot] = {}
        # So many calls at once.
        self._permits = asyncio.Semaphore(num_workers or sys.maxsize)
        # So many agents are made at once: imports of many would starve each other.
        self._builds = asyncio.Semaphore(os.cpu_count() or 1)
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="environments", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def tool_schemas(self) -> list[list[dict[str, Any]] | None]:
        """Lists each spec's tools; builds one agent of each, which waits for its first episode.

        Raises:
            CannotBuild: agents cannot be built; the pool is then shut down.
        """
        missing = [index for index in range(len(self._specs)) if index not in self._schemas]
        slots = [self._new_slot(index) for index in missing]
        building = [
            asyncio.run_coroutine_threadsafe(self._build(slot), self._loop) for slot in slots
        ]
        problems = []
        for slot, future in zip(slots, building, strict=True):
            reply = future.result()
            if reply.failure:
                name = self._names[slot.spec_index]
                problems.append(f"environment {name} cannot be built: {reply.error}")
        if problems:
            self.shutdown()
            raise CannotBuild(problems)
        for slot in slots:
            self._free[slot.spec_index].append(slot)
        return [self._schemas[index] for index in range(len(self._specs))]

    # The caller's side

    def reset(self, key: Hashable, spec_index: int, seed: int, task: Task | None = None) -> None:
        """Starts an episode of a spec under a key of the caller's choice."""
        self._begin(key, spec_index, "reset", (seed, task))

    def trial(
        self,
        key: Hashable,
        spec_index: int,
        seed: int,
        episodes: int,
        max_turn: int,
        task: Task | None = None,
    ) -> None:
        """Lets an agent play some episodes by itself (custom/agent.py); needs no `finish`."""
        self._begin(key, spec_index, "trial", (seed, episodes, max_turn, task))

    def step(self, key: Hashable, text: str) -> None:
        """Sends the policy's response."""
        self._submit(self._episodes[key], key, "step", (text,))

    def finish(self, key: Hashable, ending: str) -> None:
        """Ends an episode that has not failed."""
        self._submit(self._episodes[key], key, "finish", (ending,))

    def poll(self, timeout: float) -> list[Answer]:
        """Returns the new replies; waits for the first at most `timeout` seconds."""
        replies: list[Answer] = []
        with contextlib.suppress(Empty):
            while True:
                block = timeout > 0 and not replies
                replies.append(self._replies.get(block, timeout))
        return replies

    def shutdown(self) -> None:
        """Closes every environment, all at once, and kills what does not close in time."""
        if self._closed:
            return
        self._closed = True
        slots = list(self._slots)
        # Calls that have not begun are dropped.
        for slot in slots:
            slot.discarded = True
        asyncio.run_coroutine_threadsafe(self._close(slots), self._loop).result()
        # The loop kills what has not closed by then.
        killed_at = time.monotonic() + self.close_timeout_s + GRACE_S
        last = killed_at + LAST_JOIN_S[self.isolation]
        for slot in slots:
            slot.thread.join(max(0.0, last - time.monotonic()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._fork_server.stop()

    def _begin(self, key: Hashable, spec_index: int, kind: Call, args: tuple[Any, ...]) -> None:
        """Takes a slot for a new episode, and submits its first call."""
        if self._closed:
            raise RuntimeError("the environment pool is shut down")
        free = self._free[spec_index]
        slot = free.pop() if free else self._new_slot(spec_index)
        slot.used_s = 0.0
        self._episodes[key] = slot
        self._submit(slot, key, kind, args)

    def _submit(self, slot: Slot, key: Hashable, kind: Call, args: tuple[Any, ...]) -> None:
        asyncio.run_coroutine_threadsafe(self._answer(slot, key, kind, args), self._loop)

    def _new_slot(self, spec_index: int) -> Slot:
        slot = Slot(spec_index, make_worker(self.isolation, self._fork_server))
        slot.thread = threading.Thread(
            target=self._serve, args=(slot,), name="environment", daemon=True
        )
        with self._lock:
            self._slots.add(slot)
        slot.thread.start()
        return slot

    # The loop's side

    async def _answer(self, slot: Slot, key: Hashable, kind: Call, args: tuple[Any, ...]) -> None:
        """Answers a call and decides what becomes of the slot."""
        ends_episode = kind in ("finish", "trial")
        reply = StepReply() if slot.built else await self._build(slot)
        if not reply.failure:
            async with self._permits:
                reply = await self._ask(slot, kind, args, self._limit(slot, kind))
            slot.used_s += reply.seconds
            if reply.failure:
                self._discard(slot)
            elif ends_episode:
                self._free[slot.spec_index].append(slot)
        if reply.failure or ends_episode:
            del self._episodes[key]
        self._replies.put((key, reply))

    async def _build(self, slot: Slot) -> StepReply:
        """Makes the slot's agent."""
        spec = self._specs[slot.spec_index]
        async with self._builds, self._permits:
            reply = await self._ask(slot, "build", (spec,), BUILD_TIMEOUT_S)
        if reply.failure:
            self._discard(slot)
        else:
            slot.built = True
            self._schemas[slot.spec_index] = reply.tools
        return reply

    async def _ask(self, slot: Slot, kind: Call, args: tuple[Any, ...], limit: float) -> StepReply:
        """Makes the slot's thread do a call; one that runs beyond its limit is answered here."""
        answer: asyncio.Future[StepReply] = self._loop.create_future()
        started = time.monotonic()
        wait_s = limit + GRACE_S
        slot.inbox.put((answer, kind, args))
        while True:
            done, _ = await asyncio.wait([answer], timeout=wait_s)
            if done:
                break
            left = limit + GRACE_S - slot.worker.ran()
            if left <= 0:
                return overdue(kind, time.monotonic() - started)
            # Else the machine kept it from running, or us from reading.
            wait_s = max(left, GRACE_S)
        reply = answer.result()
        if reply.seconds <= limit:
            return reply
        return overdue(kind, reply.seconds)

    def _limit(self, slot: Slot, kind: Call) -> float:
        """Returns the longest that the next call may take, in seconds; inf: for ever."""
        has_step_timeout = self.step_timeout_s < math.inf
        if kind == "trial":
            step_s = self.step_timeout_s if has_step_timeout else MAX_TRIAL_STEP_S
            return MAX_TRIAL_S + step_s
        if kind == "finish":
            return self.step_timeout_s if has_step_timeout else self.episode_timeout_s
        left_of_episode = max(0.0, self.episode_timeout_s - slot.used_s)
        return min(self.step_timeout_s, left_of_episode)

    def _discard(self, slot: Slot) -> None:
        """Makes the slot's thread close its agent and end."""
        slot.discarded = True
        slot.inbox.put(None)
        self._loop.call_later(self.close_timeout_s + GRACE_S, self._kill, slot)

    def _kill(self, slot: Slot) -> None:
        with self._lock:
            if slot in self._slots:
                slot.worker.kill()

    async def _close(self, slots: list[Slot]) -> None:
        """Drops the calls that wait, and discards all slots."""
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for slot in slots:
            self._discard(slot)

    # A slot's thread

    def _serve(self, slot: Slot) -> None:
        """Makes the slot's calls until it is discarded, then closes its agent."""
        # The loop may be closed.
        with contextlib.suppress(Abandoned, RuntimeError):
            self._make_calls(slot)
        with contextlib.suppress(Abandoned):
            slot.worker.end()
        with self._lock:
            self._slots.discard(slot)

    def _make_calls(self, slot: Slot) -> None:
        """Makes the calls that come, and hands their replies to the loop."""
        while True:
            pending = slot.inbox.get()
            if pending is None or slot.discarded:
                return
            answer, kind, args = pending
            started = time.monotonic()
            try:
                reply = slot.worker.call(kind, args)
            except WorkerLost as lost:
                reply = crashed(str(lost), time.monotonic() - started)
            self._loop.call_soon_threadsafe(answer.set_result, reply)


def environment_name(source: Any) -> str:
    """Returns what messages and metrics call an environment.

    Such as textarena:GuessTheNumber-v0, or the name of a class, also of one that is in a file.
    """
    if not isinstance(source, str):
        return getattr(source, "__name__", type(source).__name__)
    module, _, _ = source.partition(":")
    if module.endswith(".py"):
        return source.rsplit(":", 1)[-1]
    return source
