"""The pool that runs users' environments: many episodes at once, each call with a deadline, none holding up the rest.

A slot is one env worker with the thread of the pool that makes its calls. An episode holds a slot from `reset` to the
reply of its `finish`; the slot then serves the next episode of its spec. After a failure the slot is thrown away: its
agent is closed in the background, its env worker killed if that takes too long.

    caller's thread      reset/step/finish                                                    poll
    an event loop's      `_answer`: waits for a permit (num_workers at a time, FIFO)          -> replies
    the slot's           `_serve`: worker.call ---- or, at the call's deadline, env_timeout --^

Invariant: every accepted call gets exactly one StepReply, whatever user code does: `_answer` is one coroutine a call,
and gives that of the env worker or that of the deadline; what a discarded slot's worker says later is dropped.
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
from functools import partialmethod
from queue import Empty, SimpleQueue
from typing import Any

from custom.agent import LONGEST_S, AgentSpec
from custom.confine import Limits
from custom.env import Abandoned
from workers.environments import env_server
from workers.environments.env_server import (
    Call,
    EnvWorker,
    ForkServer,
    Isolation,
    StepReply,
    WorkerLost,
)

# The episode's key, and the reply.
Answer = tuple[Any, StepReply]
MAX_CLOSE_S = 5.0
# The longest that making an agent may take, imports included; it is part of no episode.
BUILD_TIMEOUT_S = 120.0
# For one call within a trial, where calls have no deadline.
MAX_TRIAL_STEP_S = 120.0
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


@dataclass(eq=False)
class Slot:
    """Is one env worker, and the thread that makes its calls.

    Attributes:
        inbox: its calls, each with the future of its reply; None ends the thread.
        built: its agent is made.
        discarded: it serves no further episode.
        used_s: the environment's own time in this episode.
    """

    spec_index: int
    worker: EnvWorker
    thread: threading.Thread = field(init=False)
    inbox: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    built: bool = False
    discarded: bool = False
    used_s: float = 0.0


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
        limits: Limits | None = None,
    ) -> None:
        self.isolation = isolation
        bounds = (
            math.inf if bound is None else bound for bound in (step_timeout_s, episode_timeout_s)
        )
        self.step_timeout_s, self.episode_timeout_s = bounds
        self.close_timeout_s = min(MAX_CLOSE_S, self.step_timeout_s)
        self._specs = (
            list(specs) if isolation == "thread" else [env_server.pickled(spec) for spec in specs]
        )
        self._names = [environment_name(spec.source) for spec in specs]
        self._fork_server = ForkServer((spec.environment for spec in specs), limits or Limits())
        self._schemas: dict[int, list[dict[str, Any]] | None] = {}
        self._replies: SimpleQueue[Answer] = SimpleQueue()
        # Nobody kills a worker whose thread has left the slots, which are all whose threads live.
        self._lock, self._slots = threading.Lock(), set[Slot]()
        self._free: list[list[Slot]] = [[] for _ in specs]
        self._episodes: dict[Hashable, Slot] = {}
        # So many calls at once, and so many agents that are made: imports of many would starve each other.
        self._permits = asyncio.Semaphore(num_workers or sys.maxsize)
        self._builds = asyncio.Semaphore(os.cpu_count() or 1)
        self._closed, self._loop = False, asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="environments", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def tool_schemas(self) -> list[list[dict[str, Any]] | None]:
        """Lists each spec's tools; builds one agent of each, which then waits for its first episode.

        Raises:
            CannotBuild: agents cannot be built; the pool is then shut down.
        """
        missing = [index for index in range(len(self._specs)) if index not in self._schemas]
        slots = [self._new_slot(index) for index in missing]
        built = [asyncio.run_coroutine_threadsafe(self._build(slot), self._loop) for slot in slots]
        replies = [
            (self._names[index], future.result())
            for index, future in zip(missing, built, strict=True)
        ]
        if failed := [
            f"environment {name} cannot be built: {reply.error}"
            for name, reply in replies
            if reply.failure
        ]:
            self.shutdown()
            raise CannotBuild(failed)
        for slot in slots:
            self._free[slot.spec_index].append(slot)
        return [self._schemas[index] for index in range(len(self._specs))]

    def poll(self, timeout: float) -> list[Answer]:
        """Returns the replies since the last time; waits at most `timeout` seconds for the first."""
        replies: list[Answer] = []
        with contextlib.suppress(Empty):
            while True:
                replies.append(self._replies.get(timeout > 0 and not replies, timeout))
        return replies

    def shutdown(self) -> None:
        """Closes every environment, all at once, and kills what does not close in time."""
        if self._closed:
            return
        self._closed, slots = True, list(self._slots)
        # Calls that have not begun are dropped.
        for slot in slots:
            slot.discarded = True
        asyncio.run_coroutine_threadsafe(self._close(slots), self._loop).result()
        # The loop kills what has not closed by then.
        last = time.monotonic() + self.close_timeout_s + GRACE_S + LAST_JOIN_S[self.isolation]
        for slot in slots:
            slot.thread.join(max(0.0, last - time.monotonic()))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._fork_server.stop()

    # The caller's side

    def _begin(self, kind: Call, key: Hashable, spec_index: int, *args: Any) -> None:
        if self._closed:
            raise RuntimeError("the environment pool is shut down")
        free = self._free[spec_index]
        slot = self._episodes[key] = free.pop() if free else self._new_slot(spec_index)
        slot.used_s = 0.0
        self._submit(slot, key, kind, args)

    def _continue(self, kind: Call, key: Hashable, *args: Any) -> None:
        self._submit(self._episodes[key], key, kind, args)

    # Starts an episode under a name of the caller's choice: (key, spec_index, seed, task=None).
    reset = partialmethod(_begin, "reset")
    # Has an agent play some by itself (custom/agent.py): (key, spec_index, seed, episodes, max_turn, task=None).
    trial = partialmethod(_begin, "trial")
    # Sends the policy's response: (key, text).
    step = partialmethod(_continue, "step")
    # Ends an episode that has not failed: (key, ending).
    finish = partialmethod(_continue, "finish")

    def _submit(self, slot: Slot, key: Hashable, kind: Call, args: tuple[Any, ...]) -> None:
        asyncio.run_coroutine_threadsafe(self._answer(slot, key, kind, args), self._loop)

    def _new_slot(self, spec_index: int) -> Slot:
        slot = Slot(spec_index, env_server.make_worker(self.isolation, self._fork_server))
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
        reply = StepReply() if slot.built else await self._build(slot)
        if not reply.failure:
            async with self._permits:
                reply = await self._ask(slot, kind, args, self._limit(slot, kind))
            slot.used_s += reply.seconds
            if reply.failure:
                self._discard(slot)
            elif kind in ("finish", "trial"):
                self._free[slot.spec_index].append(slot)
        if reply.failure or kind in ("finish", "trial"):
            del self._episodes[key]
        self._replies.put((key, reply))

    async def _build(self, slot: Slot) -> StepReply:
        """Makes the slot's agent."""
        async with self._builds, self._permits:
            built = await self._ask(slot, "build", (self._specs[slot.spec_index],), BUILD_TIMEOUT_S)
        if built.failure:
            self._discard(slot)
        else:
            slot.built, self._schemas[slot.spec_index] = True, built.tools
        return built

    async def _ask(self, slot: Slot, kind: Call, args: tuple[Any, ...], limit: float) -> StepReply:
        """Has the slot's thread make a call; one that runs beyond its limit is answered here."""
        answer, started, left = self._loop.create_future(), time.monotonic(), limit + GRACE_S
        slot.inbox.put((answer, kind, args))
        while not (await asyncio.wait([answer], timeout=left))[0]:
            # Else the machine kept it from running, or us from reading.
            if (left := limit + GRACE_S - slot.worker.ran()) <= 0:
                return overdue(kind, time.monotonic() - started)
            left = max(left, GRACE_S)
        reply = answer.result()
        return reply if reply.seconds <= limit else overdue(kind, reply.seconds)

    def _limit(self, slot: Slot, kind: Call) -> float:
        """Returns the longest that the next call may take; inf: for ever."""
        step_s, episode_s = self.step_timeout_s, self.episode_timeout_s
        if kind == "trial":
            return LONGEST_S + (MAX_TRIAL_STEP_S if step_s == math.inf else step_s)
        if kind == "finish":
            return episode_s if step_s == math.inf else step_s
        return min(step_s, max(0.0, episode_s - slot.used_s))

    def _discard(self, slot: Slot) -> None:
        """Has the slot's thread close its agent and end."""
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
        # The loop may be closed.
        with contextlib.suppress(Abandoned, RuntimeError):
            while (call := slot.inbox.get()) is not None and not slot.discarded:
                (answer, kind, args), started = call, time.monotonic()
                try:
                    reply = slot.worker.call(kind, args)
                except WorkerLost as lost:
                    reply = env_server.crashed(str(lost), time.monotonic() - started)
                self._loop.call_soon_threadsafe(answer.set_result, reply)
        with contextlib.suppress(Abandoned):
            slot.worker.end()
        with self._lock:
            self._slots.discard(slot)


def overdue(kind: Call, seconds: float) -> StepReply:
    """Makes the reply of a call that ran beyond its deadline."""
    text = f"{kind} was still running at its deadline, after {seconds:.3g} s"
    return StepReply(failure="env_timeout", error=text, seconds=seconds)


def environment_name(source: Any) -> str:
    """Returns what messages and metrics call it: textarena:GuessTheNumber-v0, or the name of a class."""
    if isinstance(source, str):
        return source.rsplit(":", 1)[-1] if source.partition(":")[0].endswith(".py") else source
    return getattr(source, "__name__", type(source).__name__)
