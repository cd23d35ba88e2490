"""One attempt at an episode: its program, the requests that it makes, and the clock of its work.

All of it belongs to the thread of the pool (pool.py). A program's clock runs while nothing of it is
being answered: it starts, computes, waits for others; it stands still while the program's first
process waits for a processor of a busy machine. Invariant: `tell` is called for nothing more
once `Exited` was told; a request gets its answer or an error, and is counted once however often a
client that was cut off asks for it again.

Limits end an episode once: the first request behind its last turn settles that. Its program has
`programs.grace_s` of its own time left to say what it earned; then it is ended, whether it asks
again or not. The same holds for one that asks again and again what has no room.

    the same body comes again                               it gets
    while an answer to it waits that nobody listens for     that answer, the oldest of several
    otherwise, also where it is marked as a retry           an answer of its own
        (x-stainless-retry-count, as the SDKs do)

A retry never gets an answer that was delivered: a client that asks the same question several times,
to vote on it, has that one already.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from custom.model_usage import Counts
from data.warn_once import warn_once
from features.programs.exchange import (
    Answer,
    AnsweredCompletion,
    Asked,
    AskedCompletion,
    Exited,
    Gone,
    Json,
    ProgramEvent,
    Refusal,
    Rewarded,
)
from features.programs.helper_requests import is_helper
from features.programs.protocols import ProtocolError
from features.programs.recall import Recall, message_of, without_thinking
from features.programs.report import ProgramReport
from features.programs.spec import ProgramSpec
from workers.environments.clock import SHORT_S
from workers.rollout.speaker import NOBODY, Speaker

# For so many seconds an answer waits for a client that hung up.
RETRY_S = 20.0
# How a refusal is told: the code and the status of HTTP.
REFUSALS: dict[Refusal, tuple[str, int]] = {
    "context_length": ("context_length_exceeded", 400),
    "template": ("invalid_messages", 400),
    "sampling": ("invalid_sampling", 400),
    "engine": ("engine_error", 500),
    "ended": ("episode_ended", 410),
}


@dataclass(eq=False)
class Pending:
    """Holds a request on its way, and then its answer.

    Attributes:
        asked: as the client sent it.
        digest: of its body.
        trained: its answer is trained on.
        before: stands for the conversation that it goes on.
        reward: that its header says of the answer before it.
        listeners: connections that wait for the answer.
        delivered: one of them was sent all of it.
        gone: what gives the answer up, where nobody has listened for a while.
    """

    number: int
    asked: AskedCompletion
    digest: bytes
    answered: "asyncio.Future[AnsweredCompletion]"
    before: str = ""
    trained: bool = True
    reward: float | None = None
    listeners: int = 0
    delivered: bool = False
    gone: asyncio.TimerHandle | None = None

    @property
    def is_left(self) -> bool:
        """Returns whether its answer was not delivered, and nobody listens for it."""
        return not self.listeners and not self.delivered


@dataclass(frozen=True)
class Deadlines:
    """Bounds a program's own time, in seconds; None: for ever.

    Attributes:
        step_s: from an answer, or its start, to its next request, or its end; requests that are
            refused in a row count as none.
        episode_s: all of it together.
        grace_s: that is left to it behind a limit of the episode.
    """

    step_s: float | None = None
    episode_s: float | None = None
    grace_s: float = 5.0


@dataclass(eq=False)
class Attempt:
    """Keeps an attempt at an episode.

    Args:
        key: the episode's.
        task: as JSON text.
        token: its name at the server, which nobody can guess.
        tell: hands an event to the turn loop.
        kill: ends the program.
        waited: returns the seconds for which its first process has waited for a processor.

    Attributes:
        exited: nothing more is told of it.
        ending: it takes no more requests.
        failure: why it was given up, "" where it was not.
        has_failed: it crashed, or was given up, and no limit of the episode is the reason.
        limits: the refusals that it heard because of a limit.
        is_cut_short: it was ended behind a limit.
        reward_told: it has said what answers earned.
        folder: in which its program works; "": where the trainer was started.
        output: the end of what it wrote to standard output.
        used_s: its own time.
        usage: what its function asked of the models beside the policy.
        left: the reward with which an episode ends that is played by hand.
    """

    key: int
    spec: ProgramSpec
    seed: int
    task: str
    token: str
    recall: Recall
    deadlines: Deadlines
    tell: Callable[[int, ProgramEvent], None]
    kill: Callable[[], None]
    waited: Callable[[], float] = lambda: 0.0
    pending: dict[int, Pending] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(
        default_factory=lambda: {"retries": 0, "http_errors": 0, "ignored": 0}
    )
    failure: str = ""
    has_failed: bool = False
    limits: set[Refusal] = field(default_factory=set)
    is_cut_short: bool = False
    folder: str = ""
    output: str = ""
    exited: bool = False
    ending: bool = False
    reward_told: bool = False
    used_s: float = 0.0
    usage: Counts = field(default_factory=dict)
    left: "asyncio.Future[float | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _since: float | None = None
    _told_s: float = 0.0
    # Its own time at the answer from which its step is counted, and whether that was a refusal.
    _step_from_s: float = 0.0
    _was_refused: bool = False
    # Its own time at which its grace is over; None: it has met no limit.
    _grace_until_s: float | None = None
    # The end of its grace is what comes first of all that its clock counts to.
    _is_in_grace: bool = False
    # Its own time when each request, by digest, was first told that it has no room.
    _no_room_since_s: dict[bytes, float] = field(default_factory=dict)
    _waited: float = 0.0
    _deadline: asyncio.TimerHandle | None = None

    # The clock

    def start_clock(self) -> None:
        """Counts the program's own time from here on, up to its deadline."""
        if self._since is not None or self.exited:
            return
        self._since = time.monotonic()
        self._waited = self.waited()
        limits = []
        if self.deadlines.step_s is not None:
            used_s = self.used_s - self._step_from_s
            limits.append(max(0.0, self.deadlines.step_s - used_s))
        if self.deadlines.episode_s is not None:
            limits.append(max(0.0, self.deadlines.episode_s - self.used_s))
        self._is_in_grace = False
        if self._grace_until_s is not None:
            grace_s = max(0.0, self._grace_until_s - self.used_s)
            self._is_in_grace = grace_s <= min(limits, default=grace_s)
            limits.append(grace_s)
        if limits:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(min(limits), self._be_overdue)

    def stop_clock(self) -> None:
        """Counts no more: something of it is being answered, or it has ended."""
        if self._since is not None:
            seconds = time.monotonic() - self._since
            if seconds > SHORT_S:
                seconds = max(0.0, seconds - self._newly_waited())
            self.used_s += seconds
            self._since = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _newly_waited(self) -> float:
        """Returns for how long it waited for a processor since the clock began, or was put off."""
        return max(0.0, self.waited() - self._waited)

    def _be_overdue(self) -> None:
        """Ends a program that worked for too long; one that could not is given its time."""
        waited = self._newly_waited()
        if waited > SHORT_S and self._since is not None:
            self._since += waited
            self._waited += waited
            self._deadline = asyncio.get_running_loop().call_later(waited, self._be_overdue)
            return
        self.stop_clock()
        if self._is_in_grace:
            self._cut_short()
            return
        self.failure = (
            f"the program was still working at its deadline, after {self.used_s:.3g} s of its own "
            f"(agent.step_timeout_s={self.deadlines.step_s}, "
            f"agent.episode_timeout_s={self.deadlines.episode_s})"
        )
        self.kill()

    def _cut_short(self) -> None:
        """Ends a program that goes on behind a limit of its episode."""
        self.is_cut_short = True
        self.kill()

    def _meet_limit(self, pending: Pending, refusal: Refusal) -> None:
        """Notes that a request was refused because of a limit; ends who has had its grace."""
        self.limits.add(refusal)
        if self.spec.is_by_hand:
            return
        since_s = self.used_s
        if refusal == "context_length":
            if pending.digest not in self._no_room_since_s:
                # It may ask for less.
                self._no_room_since_s[pending.digest] = self.used_s
                return
            since_s = self._no_room_since_s[pending.digest]
        if self._grace_until_s is None:
            self._grace_until_s = since_s + self.deadlines.grace_s
        if self.used_s >= self._grace_until_s:
            self._cut_short()

    def _new_seconds(self) -> float:
        """Returns the program's own time that was not told yet."""
        seconds = self.used_s - self._told_s
        self._told_s = self.used_s
        return seconds

    # Requests

    def refuse_if_ended(self) -> None:
        """Raises ProtocolError where it takes no more requests."""
        if self.exited or self.ending or self.failure or self.is_cut_short:
            raise ProtocolError("this episode has ended", "episode_ended", 410)

    def ask(self, asked: AskedCompletion, body: bytes, *, reward: float | None) -> Pending:
        """Takes a request in; returns it, or the one that it repeats. Raises ProtocolError.

        Who asked listens from here on, until `stop_listening`.
        """
        self.refuse_if_ended()
        speaker = asked.speaker
        named = f"{speaker.agent} {speaker.conversation} ".encode()
        if asked.only_counts:
            named = b"counts " + named
        digest = hashlib.blake2b(named + body, digest_size=16).digest()
        for earlier in self.pending.values():
            # One that says another reward of the answer before is to be heard.
            says_more = reward is not None and reward != earlier.reward
            if earlier.digest == digest and earlier.is_left and not says_more:
                self._adopt(earlier)
                return earlier
        if not asked.only_counts:
            check_messages(asked)
        number = len(self.pending) + 1
        future = asyncio.get_running_loop().create_future()
        recalled = self.recall.recalled(asked.messages, speaker, asked.tools)
        spec = self.spec
        trained = not is_helper(asked, spec.train_models, spec.helper_prompts)
        pending = Pending(number, asked, digest, future, recalled.digest, trained, listeners=1)
        pending.reward = reward
        self.pending[number] = pending
        self.waiting.add(number)
        self.counts["ignored"] += bool(asked.ignored)
        for name in asked.ignored:
            warn_once(__name__, f"a program sets {name}, which has no effect here")
        self.stop_clock()
        self.tell(
            self.key,
            Asked(
                number=number,
                messages=recalled.messages,
                prompt_ids=asked.prompt_ids,
                tools=asked.tools,
                max_tokens=asked.max_tokens,
                stop=asked.stop,
                wants_log_probs=asked.wants_log_probs,
                sampling=asked.sampling,
                forces_call=asked.forces_call,
                token_rules=asked.token_rules,
                speaker=speaker,
                model=asked.model,
                trained=trained,
                only_counts=asked.only_counts,
                reward=reward,
                seconds=self._new_seconds(),
            ),
        )
        self.reward_told = self.reward_told or reward is not None
        return pending

    def _adopt(self, pending: Pending) -> None:
        """Lets a client that was cut off go on waiting for its answer."""
        self.counts["retries"] += 1
        pending.listeners += 1
        if pending.gone is not None:
            pending.gone.cancel()
            pending.gone = None

    async def answer_to(self, pending: Pending) -> AnsweredCompletion:
        """Waits for a request's answer. Raises ProtocolError."""
        timeout = self.spec.request_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(pending.answered), timeout)
        except TimeoutError:
            raise ProtocolError(
                f"no answer within programs.request_timeout_s={timeout:g}", "timeout", 504
            ) from None

    def stop_listening(self, pending: Pending, *, delivered: bool) -> None:
        """Notes whether a client was sent its answer; where not, it may come back for a while."""
        pending.listeners -= 1
        pending.delivered = pending.delivered or delivered
        if pending.delivered or pending.listeners or self.exited or pending.gone is not None:
            return
        loop = asyncio.get_running_loop()
        pending.gone = loop.call_later(RETRY_S, self._give_up, pending)

    def _give_up(self, pending: Pending) -> None:
        """Tells that nobody came back for an answer."""
        if pending.delivered or pending.listeners or self.exited:
            return
        # A request like it is a new one from here on.
        pending.digest = b""
        pending.delivered = True
        self.waiting.discard(pending.number)
        self.tell(self.key, Gone(number=pending.number))
        if not self.waiting:
            self.start_clock()

    def take_answer(self, number: int, answer: Answer) -> None:
        """Hands an answer on to whoever listens."""
        self.waiting.discard(number)
        pending = self.pending[number]
        # One that counts for ever works for ever, as one that is refused for ever.
        self._begin_step(is_refusal=bool(answer.refusal) or pending.asked.only_counts)
        if not pending.answered.done():
            if answer.refusal in ("ended", "context_length"):
                self._meet_limit(pending, answer.refusal)
            elif "ended" not in self.limits and not pending.asked.only_counts:
                self._grace_until_s = None
            if answer.refusal:
                code, status = REFUSALS[answer.refusal]
                pending.answered.set_exception(ProtocolError(answer.error, code, status))
                # Nobody may be listening.
                pending.answered.exception()
                pending.delivered = True
                # Whoever tries again asks anew.
                pending.digest = b""
            elif pending.asked.only_counts:
                counted = AnsweredCompletion(id="", text="", answer=answer)
                pending.answered.set_result(counted)
                # It is no answer of the policy's that somebody could miss.
                pending.delivered = True
            else:
                answer_id = f"{self.key}-{number}"
                shown = self.recall.shown(pending.asked, answer_id, number, answer, pending.before)
                pending.answered.set_result(shown)
        if not self.waiting and not self.ending:
            self.start_clock()

    def _begin_step(self, *, is_refusal: bool) -> None:
        """Gives the program its time for a step; of refusals in a row the first does so alone.

        A program that asks again and again whatever it hears would work for ever.
        """
        if not (is_refusal and self._was_refused):
            self._step_from_s = self.used_s
        self._was_refused = is_refusal

    def conversations(self) -> list[list[Json]]:
        """Lists the conversations that were had, each with its last answer; no helpers'."""
        had = []
        for pending in self.pending.values():
            is_answered = pending.answered.done() and pending.answered.exception() is None
            asked = pending.asked
            if not is_answered or not asked.messages or asked.only_counts or not pending.trained:
                continue
            # One row has the answers of a client that sends thinking back, and of one that does
            # not where it is added again.
            messages = [without_thinking(message) for message in asked.messages]
            had.append([*messages, message_of(pending.answered.result())])
        return without_beginnings(had)

    def take_reward(
        self,
        reward: float,
        number: int | None = None,
        *,
        speaker: Speaker = NOBODY,
        by_refused: bool = False,
    ) -> None:
        """Hands on the reward of an answer.

        Args:
            number: of the answer's request; None: the last one that the speaker has had.
            by_refused: the header of a request says so that the episode never hears of.
        """
        if number is not None and not self._has_answered(number):
            raise ProtocolError(
                "no answer of this episode has this id: name one as it was answered, "
                "or none to mean the last",
                "not_found",
                404,
            )
        if not self.exited and not self.ending:
            self.reward_told = True
            self.tell(
                self.key,
                Rewarded(reward=reward, number=number, speaker=speaker, by_refused=by_refused),
            )

    def number_of(self, answer_id: str) -> int:
        """Returns the number in an answer's id. ValueError where it is another episode's."""
        named, _, number = answer_id.rpartition("-")
        key = named.rpartition("_")[2]
        if key and key != str(self.key):
            raise ValueError(f"{answer_id!r} is no answer of this episode")
        return int(number)

    def _has_answered(self, number: int) -> bool:
        """Returns whether a request has been answered by the policy."""
        pending = self.pending.get(number)
        if pending is None or pending.asked.only_counts or not pending.answered.done():
            return False
        return pending.answered.exception() is None

    # The end

    def leave(self, reward: float | None) -> None:
        """Ends an episode that is played by hand."""
        if not self.left.done():
            self.left.set_result(reward)

    def end_requests(self) -> None:
        """Answers what still waits: the episode has ended."""
        self.ending = True
        self.stop_clock()
        for pending in self.pending.values():
            if pending.gone is not None:
                pending.gone.cancel()
            if not pending.answered.done():
                error = ProtocolError("this episode has ended", "episode_ended", 410)
                pending.answered.set_exception(error)
                pending.answered.exception()

    def tell_exit(self, *, report: ProgramReport, crash: str, record: Json) -> None:
        """Tells that the program has ended.

        Args:
            report: what it says that it earned.
            crash: why that is a failure; a deadline that was missed is the reason before all.
        """
        if self.exited:
            return
        self.stop_clock()
        undelivered = tuple(
            number
            for number, pending in self.pending.items()
            if not pending.delivered and number not in self.waiting
        )
        counts = self.counts | {"unread_calls": self.recall.unread}
        failure: Any = "env_crash" if crash else ""
        if self.failure:
            failure = "env_timeout"
        is_at_limit = "ended" in self.limits
        if "context_length" in self.limits and failure == "env_crash":
            is_at_limit = True
        self.has_failed = bool(failure) and not is_at_limit
        self.tell(
            self.key,
            Exited(
                reward=None if failure else report.reward,
                earned={} if failure else report.earned,
                metrics={} if failure else report.metrics,
                failure=failure,
                error=self.failure or crash,
                undelivered=undelivered,
                record=record | {"counts": counts},
                seconds=self._new_seconds(),
            ),
        )
        self.exited = True
        self.end_requests()


def without_beginnings(conversations: list[list[Json]]) -> list[list[Json]]:
    """Drops the conversations that another one begins with."""
    longest_first = sorted(conversations, key=len, reverse=True)
    kept: list[list[Json]] = []
    for conversation in longest_first:
        size = len(conversation)
        if not any(other[:size] == conversation for other in kept):
            kept.append(conversation)
    return kept[::-1]


def check_messages(asked: AskedCompletion) -> None:
    """Raises ProtocolError where there is nothing that the policy could answer."""
    if asked.prompt_ids:
        return
    if not asked.messages:
        raise ProtocolError("there are no messages to answer")
    if asked.messages[-1]["role"] == "assistant":
        raise ProtocolError(
            "the last message is the assistant's, which is not continued here; end with another's"
        )
