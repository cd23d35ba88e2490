"""The pool that runs users' environments.

Many episodes run at once, each call with a deadline, and none holds up the rest. A slot is one env
worker with the thread of the pool that makes its calls. An episode holds a slot from `reset` to the
reply of its `finish`; the slot then serves the next episode of its spec. After a failure the slot
is thrown away: its agent is closed in the background, its env worker killed if that takes too long.

    caller's thread   reset/step/finish: the call begins, or waits for its turn (FIFO)    poll
    the slot's        `_make_calls`: worker.call -----------------------------------> replies
    the watch's       `_watch`: looks at calls near their deadline -- env_timeout -------^

A call whose code asks the policy (custom/asking.py) is answered in parts: a reply with questions
comes first, and `answer` goes on with the call, whose clock stands still in between.

A call begins when there is a permit (`num_workers` at a time), and in pace: threads that wake all
at once would only fight for the interpreter, so no more than PACED_CALLS are at their very
beginning. An episode that has not answered after PACE_S is at work or asleep, and makes room.

Invariant: every accepted call gets exactly one StepReply, whatever user code does: that of the env
worker or that of the watch, whichever takes `slot.call` first under the lock; what a discarded
slot's worker replies later is dropped.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from custom.asking import PolicyAnswer, trial_answers
from custom.confine import Limits
from custom.env import Task
from custom.env_calls import Abandoned
from custom.model_usage import USAGE
from custom.trial import MAX_TRIAL_S
from workers.environments.calls import Answer, Answers, PendingCall, Slot, users_line
from workers.environments.env_processes import EnvProcesses
from workers.environments.names import CannotBuild, environment_name
from workers.environments.reply import Call, StepReply, WorkerLost, crashed, held_up, overdue
from workers.environments.workers import Isolation, make_worker, pickled

logger = logging.getLogger(__name__)
MAX_CLOSE_S = 5.0  # the longest that closing an agent may take
# The longest that making an agent may take, imports included; it is part of no episode.
BUILD_TIMEOUT_S = 120.0
POLL_S = 1.0  # for which a reply is waited for at a time
MAX_TRIAL_STEP_S = 120.0  # for one call within a trial, where calls have no deadline
# How long after its deadline a call is ended: what comes till then is judged by the time that it
# took itself, which a busy pool, late to ask and late to read, does not lengthen.
GRACE_S = 0.25
# How much longer shutdown waits for the threads of env workers that were killed.
LAST_JOIN_S = {"thread": 0.5, "process": 5.0, "ray": 10.0}
# So many calls are at their very beginning, and a call is for so many seconds.
PACED_CALLS = max(4, os.cpu_count() or 1)
PACE_S = 0.002
LOOK_S = 10.0  # the watch looks at least so often: a call so rarely has to wake it


class EnvironmentPool(contextlib.AbstractContextManager["EnvironmentPool", None]):
    """Runs agents built from `specs`, or other jobs that these build (`run`).

    Its owner's thread calls, and no call blocks but `poll`, `tool_schemas` and `shutdown`.

    Args:
        isolation: where environments live. A thread that hangs in code other than Python cannot be
            stopped, a process and a Ray actor can.
        num_workers: calls that run at once; None: as many as there are episodes. Waiting for one's
            turn counts for no deadline.
        step_timeout_s: the longest that one reset, step or finish may take; None: for ever.
        episode_timeout_s: the longest that an episode's reset and steps may take together, and its
            finish if step_timeout_s is None.
        step_wall_timeout_s: the longest that a call with a deadline may take by the wall's clock,
            if that is longer; None: for ever.
        limits: what a process of an environment's may have.
        replies: where replies go; None: a queue of the pool's.

    Deadlines count the environment's own time (`TaskClock`): what it computes, and what it waits
    for; not the time for which a busy machine keeps it from running, but by `step_wall_timeout_s`.

    Raises:
        ValueError: a spec does not pickle for another process.
    """

    def __init__(
        self,
        specs: Sequence[Any],
        *,
        isolation: Isolation = "thread",
        num_workers: int | None = None,
        step_timeout_s: float | None = None,
        episode_timeout_s: float | None = None,
        step_wall_timeout_s: float | None = None,
        limits: Limits | None = None,
        replies: SimpleQueue[Answer] | None = None,
    ) -> None:
        self.isolation = isolation
        self.num_workers = num_workers or sys.maxsize
        self.step_timeout_s = math.inf if step_timeout_s is None else step_timeout_s
        self.episode_timeout_s = math.inf if episode_timeout_s is None else episode_timeout_s
        self.wall_timeout_s = math.inf if step_wall_timeout_s is None else step_wall_timeout_s
        self.close_timeout_s = min(MAX_CLOSE_S, self.step_timeout_s)
        self._specs: list[Any] = list(specs)
        if isolation != "thread":
            self._specs = [pickled(spec) for spec in specs]
        self._names = [environment_name(spec.source) for spec in specs]
        self._asks_player = [asks_player(spec) for spec in specs]
        self._processes = EnvProcesses((spec.libraries for spec in specs), limits or Limits())
        self._replies: SimpleQueue[Answer] = SimpleQueue() if replies is None else replies
        # The slots whose threads live; nobody kills a worker whose thread has left them.
        self._slots: set[Slot] = set()
        self._leaving = threading.Lock()
        # All below is read and written under this lock; `_nearer` wakes the watch.
        self._lock = threading.Lock()
        self._nearer = threading.Condition(self._lock)
        self._schemas: dict[int, list[dict[str, Any]] | None] = {}
        # The slots of each spec that wait for an episode.
        self._free: list[list[Slot]] = [[] for _ in specs]
        self._episodes: dict[Hashable, Slot] = {}
        # Calls that wait for their turn; so many agents are made at once as there are processors:
        # imports of many would starve each other.
        self._waiting: deque[PendingCall] = deque()
        self._to_build: deque[PendingCall] = deque()
        self._num_building = 0
        self._running: set[PendingCall] = set()
        # The running episodes at their very beginning, and how many of these there may be.
        self._num_new = 0
        self._most_new = PACED_CALLS
        # Discarded slots, and when each is killed.
        self._closing: dict[Slot, float] = {}
        self._next_look = math.inf
        # Replies that nobody asked for, by the environment's name.
        self.num_strays: dict[str, int] = {}
        self._closed = False
        self._stopped = False
        self._thread = threading.Thread(target=self._watch, name="environments", daemon=True)
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
        built: SimpleQueue[Answer] = SimpleQueue()
        for index in missing:
            slot = self._new_slot(index)
            # No episode's key is like it.
            key = ("build", index)
            build = PendingCall(slot, key, "build", (self._specs[index],), built)
            with self._lock:
                self._to_build.append(build)
                self._begin_calls()
        replies = dict(built.get() for _ in missing)
        problems = []
        for index in missing:
            reply = replies["build", index]
            name = self._names[index]
            if reply.failure == "reward_fault":
                problems.append(f"{reply.error}; it is to pay episodes of {name}")
            elif reply.failure:
                problems.append(f"environment {name} cannot be built: {reply.error}")
        if problems:
            self.shutdown()
            raise CannotBuild(problems)
        return [self._schemas[index] for index in range(len(self._specs))]

    # The caller's side

    def reset(self, key: Hashable, spec_index: int, seed: int, task: Task | None = None) -> None:
        """Starts an episode of a spec under a key of the caller's choice."""
        self._begin_episode(key, spec_index, "reset", (seed, task))

    def restore(self, key: Hashable, spec_index: int, place: str, *args: Any) -> None:
        """Starts an episode in its midst: a function puts the agent there (`EnvServer.visit`)."""
        self._begin_episode(key, spec_index, "restore", (place, *args))

    def visit(self, key: Hashable, place: str, *args: Any) -> None:
        """Calls a function with an episode's agent; the reply has the text that it returns."""
        self._submit(self._episodes[key], key, "visit", (place, *args))

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
        self._begin_episode(key, spec_index, "trial", (seed, episodes, max_turn, task))

    def run(
        self, key: Hashable, spec_index: int, *args: Any, answers: Answers | None = None
    ) -> None:
        """Calls `run` of what a spec builds, which is a job and no agent; needs no `finish`.

        `answers` gets the reply; None: `poll`.
        """
        self._begin_episode(key, spec_index, "run", args, answers)

    def abandon(self, key: Hashable, reply: StepReply) -> None:
        """Answers an episode's call with a failure, in the place of an agent that is given up."""
        with self._lock:
            slot = self._episodes.get(key)
            if slot is not None and slot.call is not None and slot.call.key == key:
                self._answer(slot.call, reply)

    def line_of(self, key: Hashable) -> str:
        """Returns FILE:LINE of the user's line that an episode's call is in; "" in processes."""
        slot = self._episodes.get(key)
        if slot is None or self.isolation != "thread":
            return ""
        return users_line(slot.thread)

    def step(self, key: Hashable, text: str) -> None:
        """Sends the policy's response."""
        self._submit(self._episodes[key], key, "step", (text,))

    def finish(self, key: Hashable, ending: str) -> None:
        """Ends an episode that has not failed."""
        self._submit(self._episodes[key], key, "finish", (ending,))

    def answer(self, key: Hashable, answers: Sequence[PolicyAnswer]) -> None:
        """Goes on with an episode's call, whose questions are answered."""
        self._submit(self._episodes[key], key, "answer", (answers,))

    def give_up(self, key: Hashable, error: str) -> None:
        """Ends an episode whose call waits for answers that there will not be."""
        with self._lock:
            self._discard(self._episodes.pop(key))
        self._replies.put((key, crashed(error)))

    def poll(self, timeout: float) -> list[Answer]:
        """Returns the new replies; waits for the first at most `timeout` seconds."""
        replies: list[Answer] = []
        with contextlib.suppress(Empty):
            while True:
                block = timeout > 0 and not replies
                replies.append(self._replies.get(block, timeout))
        return replies

    def wait_for_reply(self, on_wait: Callable[[float], None] | None = None) -> StepReply:
        """Waits for the reply to the one call that was made.

        What that asks the policy meanwhile is answered as in a trial.

        Args:
            on_wait: is told now and then for how many seconds it has been waited for.
        """
        begun_at = time.monotonic()
        asked = 0
        while True:
            answers = self.poll(POLL_S)
            if answers:
                key, reply = answers[0]
                if not reply.questions:
                    return reply
                self.answer(key, trial_answers(reply.questions, asked))
                asked += len(reply.questions)
            if on_wait is not None:
                on_wait(time.monotonic() - begun_at)

    def shutdown(self) -> None:
        """Closes every environment, all at once, and kills what does not close in time."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # Calls that have not begun are dropped, and so are the replies of those that have.
            self._waiting.clear()
            self._to_build.clear()
            self._running.clear()
            slots = list(self._slots)
            for slot in slots:
                slot.call = None
                self._discard(slot)
        # The watch kills what has not closed by then.
        killed_at = time.monotonic() + self.close_timeout_s + GRACE_S
        last = killed_at + LAST_JOIN_S[self.isolation]
        for slot in slots:
            slot.thread.join(max(0.0, last - time.monotonic()))
        with self._lock:
            self._stopped = True
            self._nearer.notify()
        self._thread.join()
        self._processes.stop()

    def _begin_episode(
        self,
        key: Hashable,
        spec_index: int,
        kind: Call,
        args: tuple[Any, ...],
        answers: Answers | None = None,
    ) -> None:
        """Takes a slot for a new episode, and submits its first call."""
        if self._closed:
            raise RuntimeError("the environment pool is shut down")
        with self._lock:
            free = self._free[spec_index]
            slot = free.pop() if free else None
        if slot is None:
            slot = self._new_slot(spec_index)
        slot.used_s = 0.0
        self._episodes[key] = slot
        self._submit(slot, key, kind, args, answers)

    def _submit(
        self,
        slot: Slot,
        key: Hashable,
        kind: Call,
        args: tuple[Any, ...],
        answers: Answers | None = None,
    ) -> None:
        """Lets a call begin when it is its turn, behind the making of its agent."""
        answers = answers or self._replies
        call = PendingCall(slot, key, kind, args, answers)
        with self._lock:
            if slot.built:
                self._waiting.append(call)
            else:
                spec = self._specs[slot.spec_index]
                build = PendingCall(slot, key, "build", (spec,), answers, behind=call)
                self._to_build.append(build)
            self._begin_calls()

    def _new_slot(self, spec_index: int) -> Slot:
        worker = make_worker(self.isolation, self._processes, self._asks_player[spec_index])
        slot = Slot(spec_index, worker)
        worker.set_exchange(partial(self._exchange, slot))
        slot.thread = threading.Thread(
            target=self._serve, args=(slot,), name="environment", daemon=True
        )
        with self._leaving:
            self._slots.add(slot)
        slot.thread.start()
        return slot

    # Under the lock

    def _begin_calls(self) -> None:
        """Begins the calls whose turn it is."""
        num_free = self.num_workers - len(self._running)
        while self._to_build and num_free > 0 and self._num_building < (os.cpu_count() or 1):
            self._num_building += 1
            num_free -= 1
            self._begin(self._to_build.popleft())
        while self._waiting and num_free > 0 and self._num_new < self._most_new:
            num_free -= 1
            self._begin(self._waiting.popleft())
        if not self._waiting:
            self._most_new = PACED_CALLS
        elif num_free > 0:
            self._look_before(time.monotonic() + PACE_S)

    def _begin(self, call: PendingCall) -> None:
        slot = call.slot
        slot.call = call
        if call.kind != "answer":
            slot.kind = call.kind
            slot.part_s = 0.0
        call.limit = self._limit(slot)
        call.begun_at = time.monotonic()
        call.look_at = call.begun_at + min(call.limit + GRACE_S, self._wall_limit(call))
        self._running.add(call)
        self._num_new += 1
        self._look_before(call.look_at)
        slot.inbox.put(call)

    def _answer(self, call: PendingCall, reply: StepReply) -> None:
        """Answers a call that runs, and decides what becomes of its slot."""
        slot = call.slot
        slot.call = None
        self._running.discard(call)
        self._num_new -= call.is_new
        if call.kind == "build":
            self._num_building -= 1
            if not reply.failure:
                slot.built = True
                self._schemas[slot.spec_index] = reply.tools
        else:
            slot.used_s += reply.seconds
            slot.part_s += reply.seconds
        if call.behind is not None and not reply.failure:
            self._waiting.append(call.behind)
        else:
            self._hand_out(call, reply)
        self._begin_calls()

    def _hand_out(self, call: PendingCall, reply: StepReply) -> None:
        """Gives the reply to who awaits it; the slot is free, or of no use, if the episode ends."""
        slot = call.slot
        is_over = not reply.questions
        if reply.failure:
            self._discard(slot)
        elif is_over and slot.kind not in ("reset", "restore", "step", "visit"):
            self._free[slot.spec_index].append(slot)
        if reply.failure or (is_over and slot.kind in ("finish", "trial", "run")):
            self._episodes.pop(call.key, None)
        call.answers.put((call.key, reply))

    def _limit(self, slot: Slot) -> float:
        """Returns the longest that the next part of a call may take, in seconds; inf: for ever."""
        kind = slot.kind
        if kind == "build":
            return BUILD_TIMEOUT_S
        has_step_timeout = self.step_timeout_s < math.inf
        if kind == "trial":
            step_s = self.step_timeout_s if has_step_timeout else MAX_TRIAL_STEP_S
            return MAX_TRIAL_S + step_s
        if kind in ("finish", "run"):
            limit = self.step_timeout_s if has_step_timeout else self.episode_timeout_s
            return max(0.0, limit - slot.part_s)
        left_of_step = max(0.0, self.step_timeout_s - slot.part_s)
        left_of_episode = max(0.0, self.episode_timeout_s - slot.used_s)
        return min(left_of_step, left_of_episode)

    def _wall_limit(self, call: PendingCall) -> float:
        """Returns the longest that a call may take by the wall's clock."""
        if call.limit == math.inf:
            return math.inf
        return max(self.wall_timeout_s, call.limit) + GRACE_S

    def _discard(self, slot: Slot) -> None:
        """Makes the slot's thread close its agent and end."""
        slot.discarded = True
        slot.inbox.put(None)
        killed_at = time.monotonic() + self.close_timeout_s + GRACE_S
        self._closing[slot] = killed_at
        self._look_before(killed_at)

    def _look_before(self, then: float) -> None:
        """Wakes the watch where it would look too late."""
        if then < self._next_look:
            self._next_look = then
            self._nearer.notify()

    # The watch's thread

    def _watch(self) -> None:
        """Ends what is beyond its deadline, until the pool is shut down."""
        while True:
            with self._lock:
                if self._stopped:
                    return
                overdue_slots = self._look(time.monotonic())
                if not overdue_slots:
                    self._nearer.wait(self._next_look - time.monotonic())
            # Not under the lock: ending a process takes long.
            for slot in overdue_slots:
                self._kill(slot)

    def _look(self, now: float) -> list[Slot]:
        """Looks at calls near their deadline, and at new ones where others wait for these.

        Returns:
            Slots that should have closed by now.
        """
        for call in [call for call in self._running if call.look_at <= now]:
            self._look_at(call, now)
        has_old = False
        if self._waiting:
            for call in self._running:
                if call.is_new and call.begun_at <= now - PACE_S:
                    call.is_new = False
                    self._num_new -= 1
                    has_old = True
        # Calls take long, and more and more of them may begin.
        if has_old:
            self._most_new *= 2
        overdue_slots = [slot for slot, killed_at in self._closing.items() if killed_at <= now]
        for slot in overdue_slots:
            del self._closing[slot]
        looks = [call.look_at for call in self._running]
        self._next_look = min([now + LOOK_S, *looks, *self._closing.values()])
        self._begin_calls()
        return overdue_slots

    def _look_at(self, call: PendingCall, now: float) -> None:
        """Answers a call that is overdue; of one that the machine held up the deadline moves."""
        wall = now - call.begun_at
        wall_left = self._wall_limit(call) - wall
        ran = call.slot.worker.ran()
        left = call.limit + GRACE_S - ran
        if left <= 0:
            # In another process nothing is seen of it.
            line = users_line(call.slot.thread) if self.isolation == "thread" else ""
            self._answer(call, overdue(call.slot.kind, wall, line))
            return
        if wall_left <= 0:
            self._answer(call, held_up(call.slot.kind, wall, ran, call.limit))
            return
        # The machine kept it from running, or us from reading.
        call.look_at = now + min(max(left, GRACE_S), wall_left)

    def _kill(self, slot: Slot) -> None:
        with self._leaving:
            if slot in self._slots:
                slot.worker.kill()

    # A slot's thread

    def _serve(self, slot: Slot) -> None:
        """Makes the slot's calls until it is discarded, then closes its agent."""
        with contextlib.suppress(Abandoned):
            self._make_calls(slot)
        with contextlib.suppress(Abandoned):
            slot.worker.end()
        with self._leaving:
            self._slots.discard(slot)

    def _count_strays(self, slot: Slot, reply: StepReply) -> None:
        """Counts replies that nobody asked for, and children that would have sent some."""
        num_new = reply.strays + slot.worker.num_dropped
        slot.worker.num_dropped = 0
        if not num_new:
            return
        name = self._names[slot.spec_index]
        with self._lock:
            before = self.num_strays.get(name, 0)
            self.num_strays[name] = before + num_new
        # The first, then each time that there are twice as many.
        if (before + num_new).bit_length() > before.bit_length():
            logger.warning(
                "environment %s answered calls that nobody made, or forked children that came back "
                "from a call: %d times so far; they were dropped, and no episode was given them",
                name,
                before + num_new,
            )

    def _make_calls(self, slot: Slot) -> None:
        """Makes the calls that come, and answers those that nobody has answered meanwhile."""
        while True:
            call = slot.inbox.get()
            if call is None or slot.discarded:
                return
            slot.served = call
            try:
                reply = slot.worker.call(call.kind, call.args)
            except WorkerLost as lost:
                reply = crashed(str(lost), time.monotonic() - call.begun_at)
            self._take_reply(slot, reply)

    def _take_reply(self, slot: Slot, reply: StepReply) -> None:
        """Answers the call that a slot serves with what came of it, unless somebody has."""
        call = slot.served
        assert call is not None
        self._count_strays(slot, reply)
        if reply.seconds > call.limit:
            reply = replace(overdue(slot.kind, reply.seconds), usage=reply.usage)
        with self._lock:
            if slot.call is call:
                self._answer(call, reply)
            else:
                # It was asked all the same: the next reply of this process has it.
                USAGE.add(reply.usage)

    def _exchange(self, slot: Slot, part: StepReply) -> Sequence[PolicyAnswer]:
        """Hands on what a call asks that runs in this process; waits for the answers.

        Raises:
            Abandoned: the call was given up.
        """
        self._take_reply(slot, part)
        call = slot.inbox.get()
        if call is None or slot.discarded:
            # The thread is to end by it, too.
            slot.inbox.put(None)
            raise Abandoned
        slot.served = call
        answers: Sequence[PolicyAnswer] = call.args[0]
        return answers


def asks_player(spec: Any) -> bool:
    """Returns whether what a spec builds may ask who plays the episode."""
    return any(service.asks_player for service in getattr(spec, "services", ()))
