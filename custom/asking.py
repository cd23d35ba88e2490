"""The line from an episode's call to whoever plays it, by which its code asks the policy.

    user's code    policy.ask(...) -> AskingLine.ask --questions--> what keeps the call (server.py)
                                                     <--answers---- the turn loop, and the engine

A call, such as an environment's step, waits where it stands until it is answered, and goes on.
Several questions that are asked at once travel together, and are answered together. Invariant: a
line carries one bundle of questions at a time, and none once its call is over.
"""

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Literal

from custom.coroutines import MAX_CANCEL_S
from custom.env import Message

# Why the policy gave no answer:
#   not_set_up       nobody answers questions in this run
#   limit            the episode's questions, their depth or their tokens are used up
#   context_length   the messages have no room
#   template         the chat template does not take them
Refusal = Literal["", "not_set_up", "limit", "context_length", "template"]
# Answers what is asked in the trial before a run, up to so many questions of a call.
TRIAL_TEXT = ""
MAX_TRIAL_QUESTIONS = 1_000
# The name of a question to which its asker gave none.
UNNAMED = "call"


@dataclass(frozen=True, kw_only=True)
class Question:
    """Asks the policy to answer messages.

    Attributes:
        trained: the answer is trained on as any turn is; else its mask is 0.
        name: who is asked, such as `critic`.
        max_tokens: of the answer; None: as many as there may be.
        depth: 1 for what an environment asks, 2 for what a tool asks that such an answer called.
    """

    messages: list[Message]
    trained: bool = True
    name: str = UNNAMED
    max_tokens: int | None = None
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class PolicyAnswer:
    """Answers a question.

    Attributes:
        number: the question's, in its episode.
        finish_reason: `stop`, or `length` where a limit cut the answer.
        tokens: that were sampled.
        refusal: why there is no answer; "": there is one.
        error: the refusal in a sentence.
    """

    number: int = 0
    text: str = ""
    finish_reason: str = ""
    tokens: int = 0
    refusal: Refusal = ""
    error: str = ""


Exchange = Callable[[Sequence[Question]], Sequence[PolicyAnswer]]


class CallIsOver(RuntimeError):
    """Raised where a question is asked by what a call has left behind."""

    def __init__(self) -> None:
        super().__init__(
            "the call of the environment that this belongs to is over: the policy can be asked, "
            "and a reply be paid, while a reset, a step or a reward_fn of its episode runs"
        )


@dataclass(eq=False)
class AskingLine:
    """Carries the questions of one call.

    Args:
        exchange: hands questions on and waits for their answers; any thread may call it.
        episode: the number of the episode that the call belongs to, in this place.

    """

    exchange: Exchange
    episode: int = 0

    def __post_init__(self) -> None:
        self._busy = threading.Lock()
        # For how long answers were waited for, and since when one is; inf: none is.
        self._waited_s = 0.0
        self._waits_since = math.inf
        self._is_over = False
        self._asked = 0
        self._paid: dict[int, float] = {}
        self._gathered: dict[asyncio.AbstractEventLoop, list[Gathered]] = {}

    def ask(self, questions: Sequence[Question]) -> list[PolicyAnswer]:
        """Asks several questions at once; waits until all of them are answered.

        Raises:
            CallIsOver: the call has ended.
        """
        with self._busy:
            if self._is_over:
                raise CallIsOver
            self._waits_since = time.monotonic()
            try:
                return list(self.exchange(questions))
            finally:
                self._asked += len(questions)
                self._waited_s = self.waited()
                self._waits_since = math.inf

    @property
    def asked(self) -> int:
        """Counts the questions that were answered or refused."""
        return self._asked

    def waited(self) -> float:
        """Returns the seconds for which answers have been waited for so far."""
        return self._waited_s + max(0.0, time.monotonic() - self._waits_since)

    async def ask_async(self, question: Question) -> PolicyAnswer:
        """Asks a question together with those of other tasks that ask now, for an event loop."""
        loop = asyncio.get_running_loop()
        gathered = self._gathered.setdefault(loop, [])
        entry = Gathered(question, loop.create_future())
        gathered.append(entry)
        if len(gathered) == 1:
            # It runs behind those tasks that are ready now.
            loop.call_soon(lambda: self._send(loop))
        return await entry.future

    def _send(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sends what has been gathered, in a thread, so that the loop goes on."""
        entries = self._gathered.pop(loop)
        questions = [entry.question for entry in entries]

        def hand_out(answers: list[PolicyAnswer], error: BaseException | None) -> None:
            for place, entry in enumerate(entries):
                # A task that was cancelled waits no more.
                if entry.future.done():
                    continue
                if error is not None:
                    entry.future.set_exception(error)
                else:
                    entry.future.set_result(answers[place])

        def ask() -> None:
            answers: list[PolicyAnswer] = []
            raised: BaseException | None = None
            try:
                answers = self.ask(questions)
            # Whatever it is, the tasks that wait are told.
            except BaseException as error:
                raised = error
            # The loop may be closed: then nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(hand_out, answers, raised)

        # No thread of the loop's, which a program waits for as it ends.
        context = copy_context()
        threading.Thread(
            target=context.run, args=(ask,), name="asks the policy", daemon=True
        ).start()

    def pay(self, number: int, reward: float) -> None:
        """Notes what an answer has earned, for the end of the next part of the call.

        Raises:
            CallIsOver: the call has ended.
        """
        if self._is_over:
            raise CallIsOver
        self._paid[number] = reward

    def take_paid(self) -> dict[int, float]:
        """Returns what answers have earned since the last take, by the number of the question."""
        paid = self._paid
        self._paid = {}
        return paid

    def close(self) -> None:
        """Ends the line, once what is being asked is answered."""
        with self._busy:
            self._is_over = True


@dataclass(eq=False, frozen=True)
class Gathered:
    """Holds a question that waits to be sent, and the future of its answer."""

    question: Question
    future: "asyncio.Future[PolicyAnswer]"


def trial_answers(questions: Sequence[Question], asked: int) -> list[PolicyAnswer]:
    """Answers questions before a run, where no policy is; refuses them once there were many.

    Args:
        asked: how many came before these, in the same call.
    """
    if asked >= MAX_TRIAL_QUESTIONS:
        error = f"the trial before a run answers {MAX_TRIAL_QUESTIONS} questions of a call"
        return [PolicyAnswer(refusal="limit", error=error) for _ in questions]
    return [PolicyAnswer(text=TRIAL_TEXT, finish_reason="stop", tokens=1) for _ in questions]


_LINE: ContextVar[AskingLine | None] = ContextVar("line", default=None)
# How many tools' calls stand around what runs.
_DEPTH: ContextVar[int] = ContextVar("depth", default=0)
_EPISODES = itertools.count()


def next_episode() -> int:
    """Returns a number for an episode, unlike that of any other in this process."""
    return next(_EPISODES)


@contextmanager
def held(line: AskingLine) -> Iterator[None]:
    """Makes the line the one of what runs in the block, and ends it with that."""
    before = _LINE.set(line)
    try:
        yield
    finally:
        line.close()
        _LINE.reset(before)


def current_line() -> AskingLine | None:
    """Returns the line of the call that runs here; None: no call does."""
    return _LINE.get()


@contextmanager
def deeper() -> Iterator[None]:
    """Makes what is asked in the block one deeper, as that of a sub-agent's own tools is."""
    before = _DEPTH.set(_DEPTH.get() + 1)
    try:
        yield
    finally:
        _DEPTH.reset(before)


def current_depth() -> int:
    """Returns the depth of a question that is asked here: 1 at least."""
    return max(1, _DEPTH.get())


def join_within(thread: threading.Thread, timeout_s: float) -> None:
    """Waits for a thread at most so many seconds, besides those in which the policy is asked."""
    line = current_line()
    begun = time.monotonic()
    waited_before = 0.0 if line is None else line.waited()
    left = timeout_s
    while left > 0:
        thread.join(left)
        if line is None or not thread.is_alive():
            return
        waited = line.waited() - waited_before
        left = timeout_s + waited - (time.monotonic() - begun)


async def await_within(awaitable: Awaitable[Any], timeout_s: float, overdue: str) -> Any:
    """Awaits at most so many seconds, besides those in which the policy is asked.

    Raises:
        TimeoutError: it took longer, with the text `overdue`; what was awaited is cancelled.
    """
    task = asyncio.ensure_future(awaitable)
    line = current_line()
    begun = time.monotonic()
    waited_before = 0.0 if line is None else line.waited()
    left = timeout_s
    try:
        while left > 0 and not task.done():
            await asyncio.wait([task], timeout=left)
            waited = 0.0 if line is None else line.waited() - waited_before
            left = timeout_s + waited - (time.monotonic() - begun)
        if task.done():
            return task.result()
    finally:
        task.cancel()
    # What is cancelled may have something to close.
    await asyncio.wait([task], timeout=MAX_CANCEL_S)
    raise TimeoutError(overdue)
