"""One episode, as a coroutine that asks and is answered: reset, then sample and step until done.

It is answered by the turn loop (turn_loop.py). It keeps this of a conversation:

    token_ids     = P0 P1 | A0 A1 A2 | E0 E1 | A3 A4        P: prompt, A: sampled, E: environment
    response_mask =         1  1  1    0  0    1  1
    turn_ids      =         0  0  0   -1 -1    1  1

Invariants: what the policy sampled is kept as ids; what the engine sees at a turn is what the row
holds so far. A template that rewrites history continues the episode in a new row, and so does a
history that begins a new context (history.py). The limits end this:

    limit                is reached               then
    max_turn_tokens      inside a turn            the turn is closed (its end-of-turn token gets
                                                  mask 0) and played
    response_length, or  inside a turn, or there  a history may begin a new context; else the
    max_model_len        is no room for the next  episode ends as `overflow` with what it has; a
                                                  turn that was cut is not played, as its action
                                                  is not whole
    max_episode_tokens   as response_length       `overflow`
    prompt_length        by a first prompt, or a  `overflow`
                         rewritten one
    max_turn             after a turn was played  `max_turns`
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from custom.env import BadRewardFunction, Message
from custom.model_usage import Counts, add_counts
from data.cut_text import CutText
from data.seeds import seed_beside, seed_for
from data.turn_tokens import Conversation, Join, TemplateRefusal, Tools, TurnTokens
from workers.environments.reply import Call, StepReply
from workers.rollout.engine import Completion, Sampling, VersionSpan, copy_with
from workers.rollout.history import HistoryRule, NewContext, Standing, Writing, Written
from workers.rollout.speaker import NOBODY, Speaker

FAILURES = ("env_crash", "env_timeout", "engine_error")
ENDINGS = ("done", "max_turns", "overflow", *FAILURES)
# So ends an episode that a person left (features/chat): nothing failed, and no run has any.
LEFT = "left"


class Span(NamedTuple):
    """Marks the response tokens from `start` up to `end` as sampled in a turn.

    `version` is that of the weights that sampled them.
    """

    start: int
    end: int
    turn: int
    version: int = 0


class Seam(NamedTuple):
    """Marks a row with which a new context begins.

    Attributes:
        reason: one word for what began it, such as "summary".
        dropped: messages of the context before it that are not in its prompt.
        tokens: of the row before it.
        fault: a sentence on what went wrong with it; "": nothing.
    """

    reason: str
    dropped: int
    tokens: int
    fault: str = ""


@dataclass(kw_only=True)
class Row:
    """Holds one training row while it grows, in eight bytes a token of the response.

    Attributes:
        prompt_ids: never change.
        ids, log_probs: of the response, an entry a token; log-probs in nats, 0 on what nobody
            sampled.
        spans: what was sampled.
        reward_at: a reward by its position in the response.
        speaker: whose turns they are.
        seam: where a new context begins with the row; None: it does not.
        routed_experts: the engine's choices for the row's tokens from the first on, as far as it
            said; see `Completion`. A token keeps those of the turn in which it was computed first.
    """

    prompt_ids: list[int]
    ids: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    reward_at: dict[int, float] = field(default_factory=dict)
    speaker: Speaker = NOBODY
    seam: Seam | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def token_ids(self) -> list[int]:
        """Returns all that the engine is to continue."""
        return [*self.prompt_ids, *self.ids]

    def sampled_in(self, turn: int) -> list[int]:
        """Lists the ids that were sampled in a turn."""
        ids: list[int] = []
        for span in self.spans:
            if span.turn == turn:
                ids.extend(self.ids[span.start : span.end])
        return ids

    def append_sampled(self, completion: Completion, turn: int) -> None:
        """Adds what the policy sampled in a turn, a span for each version of the weights."""
        start = len(self.ids)
        self.append_tokens(completion.token_ids, completion.log_probs)
        whole = VersionSpan(version=0, start=0, end=len(completion.token_ids))
        for version, first, end in completion.versions or (whole,):
            if end > first:
                self.spans.append(Span(start + first, start + end, turn, version))
        if completion.routed_experts is not None:
            self._learn_experts(completion.routed_experts)

    def _learn_experts(self, told: np.ndarray) -> None:
        """Adds what the engine chose for tokens that came since it said so last.

        The row's last token was sampled, and not computed.
        """
        computed = len(self.prompt_ids) + len(self.ids) - 1
        if len(told) < computed:
            return
        if self.routed_experts is None:
            self.routed_experts = told[:computed]
        else:
            added = told[len(self.routed_experts) : computed]
            self.routed_experts = np.concatenate([self.routed_experts, added])

    def append_tokens(self, token_ids: list[int], log_probs: list[float] | None = None) -> None:
        """Adds tokens; without log-probs nobody sampled them."""
        self.ids.extend(token_ids)
        self.log_probs.extend(log_probs or [0.0] * len(token_ids))

    def cut(self, length: int) -> None:
        """Forgets the response behind so many tokens; no span may reach over the cut."""
        del self.ids[length:]
        del self.log_probs[length:]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts[: len(self.prompt_ids) + length]
        self.spans = [span for span in self.spans if span.end <= length]
        self.reward_at = {place: paid for place, paid in self.reward_at.items() if place < length}


@dataclass(kw_only=True)
class Turn:
    """Holds what the policy wrote in one turn, and the environment's reply, if it gave one.

    `anchor` names the state in which the turn began, `tokens` counts sampled tokens. For a program
    (features/programs) `asked` are the messages of its request, those that are new since turn
    `behind`, or all where that is None. `engine_seconds` passed from the question to the engine
    until its answer. What a history had the policy write is a turn that no environment reads: it
    `writes` that, such as a summary, and was `asked` for it. With `is_trained` false its tokens get
    mask 0.
    """

    text: str
    finish_reason: str
    tokens: int = 0
    reply: StepReply | None = None
    anchor: str = ""
    asked: list[Message] | None = None
    behind: int | None = None
    engine_seconds: float = 0.0
    writes: str = ""
    is_trained: bool = True


class FailedAttempt(NamedTuple):
    """Holds an attempt at an episode that failed, and that was played again."""

    turns: list[Turn]
    ending: str
    error: str


@dataclass(kw_only=True)
class Episode:
    """Holds one conversation with an environment.

    Attributes:
        group, sample: which prompt group it belongs to, and which of its samples it is.
        spec: the environment's index.
        seed, task: what the environment is reset with.
        rows: one, or more where the chat template rewrites history or a new context begins; the
            last one grows.
        messages: the whole conversation, of which `initial_messages` came from the reset.
        final_reward: what replaces the rewards of the turns, if the environment gave it.
        program: of a program, its numbers and the last lines of its output, by name.
        attempt: counts restarts after a crash; `failed_attempts` holds what was played before it.
        ending: one of ENDINGS; of an answer to a prompt the engine's finish reason.
        error: why it failed; `first_error` is of the first attempt that did.
        env_seconds: the environment's own time.
        models: what was asked of models beside the policy, in all attempts.
        seconds: wall time of the last attempt.
    """

    group: int
    sample: int
    spec: int = 0
    seed: int = 0
    task: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    initial_messages: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    final_reward: float | None = None
    program: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    failed_attempts: list[FailedAttempt] = field(default_factory=list)
    ending: str = ""
    error: str = ""
    first_error: str = ""
    env_seconds: float = 0.0
    models: Counts = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def row(self) -> Row:
        """Returns the row that grows."""
        return self.rows[-1]

    @property
    def anchors(self) -> list[str]:
        """Lists the states in which the turns began."""
        return [turn.anchor for turn in self.turns]

    @property
    def num_played(self) -> int:
        """Counts the turns that were sampled for the environment."""
        return sum(1 for turn in self.turns if not turn.writes)

    @property
    def tokens(self) -> int:
        """Counts the tokens of all rows behind their prompts."""
        return sum(len(row.ids) for row in self.rows)

    def is_left_out(self, span: Span) -> bool:
        """Checks whether a span is of a turn that is not trained on."""
        return span.turn < len(self.turns) and not self.turns[span.turn].is_trained

    def leave_untrained_out(self) -> None:
        """Masks the turns that are not to be trained on; they bear no reward."""
        if all(turn.is_trained for turn in self.turns):
            return
        for row in self.rows:
            row.spans = [span for span in row.spans if not self.is_left_out(span)]

    def add_reward(self, reward: float) -> None:
        """Adds a reward on the last token of the last turn; drops it where nothing was sampled.

        Turns that are not trained on bear none.
        """
        last_spans = []
        for row in self.rows:
            trained = [span for span in reversed(row.spans) if not self.is_left_out(span)]
            if trained:
                last_spans.append((row, trained[0]))
        if last_spans:
            row, span = max(last_spans, key=lambda row_and_span: row_and_span[1].turn)
            last = span.end - 1
            row.reward_at[last] = row.reward_at.get(last, 0.0) + reward

    def clear_rewards(self) -> None:
        """Takes all rewards away."""
        for row in self.rows:
            row.reward_at = {}

    def restart(self) -> None:
        """Puts what was played aside, and counts another attempt."""
        self.failed_attempts.append(FailedAttempt(self.turns, self.ending, self.error))
        self.rows = []
        self.initial_messages = []
        self.messages = []
        self.turns = []
        self.program = {}
        self.ending = ""
        self.error = ""
        self.attempt += 1


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """Bounds turns and episodes, in tokens but for `max_turn` and `max_refills`.

    `max_turn` counts turns, `max_refills` restarts after a crash. `max_episode_tokens` bounds the
    responses of all rows together. `reserved` is kept free in each row for what a history has the
    policy write.
    """

    prompt_length: int
    response_length: int
    max_model_len: int
    max_turn: int | None = None
    max_turn_tokens: int | None = None
    max_refills: int = 0
    max_episode_tokens: int | None = None
    reserved: int = 0

    def room(self, row: Row) -> int:
        """Counts the tokens that the row may still take for turns and what answers them."""
        return self.whole_room(row) - self.reserved

    def whole_room(self, row: Row) -> int:
        """Counts the tokens that the row may still take, the reserved ones too."""
        longest_response = min(self.response_length, self.max_model_len - len(row.prompt_ids))
        return longest_response - len(row.ids)

    def left(self, episode: Episode) -> int:
        """Counts the tokens that the episode may still take in all."""
        if self.max_episode_tokens is None:
            return sys.maxsize
        return self.max_episode_tokens - episode.tokens


class Sample(NamedTuple):
    """Asks the engine to continue the ids; it is answered by a Completion, or raises Ended.

    `number` tells the turns apart that an episode has sampled at the same time.
    """

    token_ids: list[int]
    sampling: Sampling
    number: int = 0


class Ask(NamedTuple):
    """Asks the environment, by a call of the pool; it is answered by a StepReply."""

    kind: Call
    args: tuple[Any, ...]


class Several(NamedTuple):
    """Makes the requests of an episode that may have several on their way.

    First the turns in `dropped` are given up, by their numbers; then the pool is told what `asks`
    say; then the turn `sample`, if any, is sampled. Whatever then comes for the episode, a
    completion or what its environment says, resumes it.
    """

    asks: Sequence[Ask] = ()
    sample: Sample | None = None
    dropped: Sequence[int] = ()


Request = Sample | Ask | Several
Play = Generator[Request, Any, None]


class Sampler(Protocol):
    """Decides how an episode's next turn is sampled; `turn` seeds it, None: the number of turns."""

    def __call__(self, episode: Episode, turn: int | None = None) -> Sampling: ...


class Player(Protocol):
    """Begins to play an episode, as `play_episode` does."""

    def __call__(
        self,
        episode: Episode,
        sampler: Sampler,
        limits: TurnLimits,
        tokens: TurnTokens | None,
        tools: Sequence[Tools],
    ) -> Play: ...


class Ended(Exception):
    """Ends the episode: (ending, error). The environment, if any, is still to be finished."""


class EnvironmentGone(Exception):
    """Ends the episode, whose environment has failed and is gone: (ending, error)."""


def play_episode(
    episode: Episode,
    sampler: Sampler,
    limits: TurnLimits,
    tokens: TurnTokens | None,
    tools: Sequence[Tools],
    history: HistoryRule | None = None,
) -> Play:
    """Plays an episode in its environment, from the reset to `episode.ending`.

    Args:
        tokens: None: the episode is a prompt and its answer.
        tools: per environment, its tools' schemas.
        history: decides where a new context begins; None: nowhere.
    """
    try:
        if tokens is None:
            completion = yield from sample(episode, sampler, limits)
            episode.ending = completion.finish_reason
            return
        playing = Playing(
            episode=episode,
            sampler=sampler,
            limits=limits,
            tokens=tokens,
            tools=tools[episode.spec],
            history=history,
        )
        episode.ending, episode.error = yield from playing.take_turns()
        reply = yield from ask(episode, "finish", episode.ending)
        if reply.reward is not None and episode.ending not in FAILURES:
            # The episode's reward replaces those of its turns.
            episode.final_reward = reply.reward
            episode.clear_rewards()
            episode.add_reward(reply.reward)
    except (Ended, EnvironmentGone) as end:
        episode.ending, episode.error = end.args
    if not episode.rows:
        episode.rows.append(Row(prompt_ids=[]))


@dataclass(kw_only=True)
class Context:
    """Holds what an episode's last row reads as.

    Attributes:
        conversation: joins the turns.
        reply: the messages that the policy read last.
        messages: those before them.
        turns: that the policy has taken in it.
        first_turn: the number of the first of these.
    """

    conversation: Conversation
    reply: list[Message]
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    first_turn: int = 0


@dataclass(kw_only=True)
class Playing:
    """Plays one attempt of an episode with an environment; arguments as of `play_episode`."""

    episode: Episode
    sampler: Sampler
    limits: TurnLimits
    tokens: TurnTokens
    tools: Tools
    history: HistoryRule | None
    context: Context = field(init=False)

    def take_turns(self) -> Generator[Request, Any, tuple[str, str]]:
        """Samples and steps until something ends the episode; returns the ending and the error."""
        episode = self.episode
        limits = self.limits
        reply = yield from ask(episode, "reset", episode.spec, episode.seed, episode.task)
        try:
            if not self._begin_episode(reply.messages):
                return "overflow", ""
            while True:
                turn = yield from self._take_turn(anchor_of(reply))
                is_cut = turn.finish_reason == "length"
                if is_cut and self._room() <= 0:
                    if not (yield from self._leave_cut_turn(reply)):
                        return "overflow", ""
                    continue
                text = CutText(turn.text) if is_cut else turn.text
                reply = yield from ask(episode, "step", text)
                turn.reply = reply
                episode.add_reward(reply.reward or 0.0)
                if reply.done:
                    return "done", ""
                if limits.max_turn is not None and episode.num_played >= limits.max_turn:
                    return "max_turns", ""
                yield from self._go_on(turn, reply)
        except Ended as end:
            return end.args
        # The environment's words do not fit into the conversation.
        except TemplateRefusal as error:
            return "env_crash", str(error)

    def _begin_episode(self, messages: list[Message]) -> bool:
        """Begins the first row with the reset's messages; returns whether the prompt fits."""
        conversation = self.tokens.conversation(messages, self.tools)
        self.context = Context(conversation=conversation, reply=messages)
        self.episode.initial_messages = messages
        self.episode.messages = list(messages)
        prompt = conversation.prompt()
        self.episode.rows.append(Row(prompt_ids=prompt[: self.limits.prompt_length]))
        return len(prompt) <= self.limits.prompt_length

    def _take_turn(self, anchor: str) -> Generator[Request, Completion, Turn]:
        """Samples a turn; `anchor` names the state in which it begins. Raises Ended."""
        asked_at = time.perf_counter()
        completion = yield from sample(self.episode, self.sampler, self.limits)
        engine_seconds = time.perf_counter() - asked_at
        turn = Turn(
            text=self.tokens.text(completion.token_ids),
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            anchor=anchor,
            engine_seconds=engine_seconds,
        )
        self.episode.turns.append(turn)
        self.context.turns += 1
        return turn

    def _room(self) -> int:
        """Counts the tokens that the row, and the episode, may still take."""
        return min(self.limits.room(self.episode.row), self.limits.left(self.episode))

    def _go_on(self, turn: Turn, reply: StepReply) -> Generator[Request, Completion, None]:
        """Joins what answered a turn to the row, or begins a new context. Raises Ended."""
        context = self.context
        answer = {"role": "assistant", "content": turn.text}
        self.episode.messages += [answer, *reply.messages]
        context.messages += [*context.reply, answer]
        context.reply = reply.messages
        if reply.replaces_history:
            self._begin_context(NewContext(reply.messages, "environment"))
            return
        before = None if self.history is None else context.conversation.copy()
        joined = context.conversation.join(self._last_ids(), reply.messages)
        if before is not None and self.limits.left(self.episode) > 0:
            decision = yield from self._decide(self._standing(joined), before, anchor_of(reply))
            if decision is not None:
                self._begin_context(decision)
                return
        self._join(joined)

    def _last_ids(self) -> list[int]:
        """Lists the ids of the last turn."""
        return self.episode.row.sampled_in(len(self.episode.turns) - 1)

    def _join(self, joined: Join) -> None:
        """Adds what follows a turn to the row. Raises Ended where there is no room.

        Where the template rewrites history it starts a new row.
        """
        rewritten_prompt = joined.rewritten
        if rewritten_prompt is None:
            is_full = len(joined.token_ids) >= self._room()
        else:
            is_full = len(rewritten_prompt) > self.limits.prompt_length
        if is_full:
            raise Ended("overflow", "")
        self.episode.row.append_tokens(joined.token_ids)
        if rewritten_prompt is not None:
            self.episode.rows.append(Row(prompt_ids=rewritten_prompt))

    # Contexts.

    def _leave_cut_turn(self, reply: StepReply) -> Generator[Request, Completion, bool]:
        """Begins a new context behind a turn that the context's end cut, to take it anew there.

        Returns whether one begins: not where the turn was the context's first, or the episode's
        limits are reached.
        """
        is_last = self.limits.max_turn is not None and (
            self.episode.num_played >= self.limits.max_turn
        )
        if self.history is None or self.context.turns == 1 or is_last:
            return False
        if self.limits.left(self.episode) <= 0:
            return False
        before = self.context.conversation.copy()
        decision = yield from self._decide(self._standing(None), before, anchor_of(reply))
        if decision is None:
            return False
        self._begin_context(decision)
        return True

    def _standing(self, joined: Join | None) -> Standing:
        """Returns what the history is shown.

        Args:
            joined: what follows the last turn; None: it was cut, and nothing does.
        """
        row = self.episode.row
        context = self.context
        tokens = len(row.prompt_ids) + len(row.ids)
        room = self.limits.room(row)
        turns = context.turns
        if joined is None:
            room = min(room, 0)
            turns -= 1
        elif joined.rewritten is not None:
            tokens = len(joined.rewritten)
            room = self.limits.room(Row(prompt_ids=joined.rewritten))
            if tokens > self.limits.prompt_length:
                room = min(room, 0)
        else:
            tokens += len(joined.token_ids)
            room -= len(joined.token_ids)
        seed = seed_for(self.episode.seed, 0, 0, self.episode.sample, context.first_turn)
        return Standing(
            task=list(self.episode.initial_messages),
            messages=list(context.messages),
            reply=list(context.reply),
            turns=turns,
            tokens=tokens,
            room=room,
            turn_tokens=self.limits.max_turn_tokens or 1,
            max_prompt=self.limits.prompt_length,
            seed=seed_beside(seed, "context"),
            count=self._count,
        )

    def _count(self, messages: list[Message]) -> int:
        """Counts the tokens of a prompt of these messages."""
        return len(self.tokens.history(messages, self.tools).prompt())

    def _decide(
        self, standing: Standing, conversation: Conversation, anchor: str
    ) -> Generator[Request, Completion, NewContext | None]:
        """Asks the history, and has the policy write what it asks for.

        Args:
            conversation: up to the turn before the last.
            anchor: names the state behind the last turn.

        Raises:
            Ended: a turn cannot be sampled, or the template refuses what is to be read.
        """
        assert self.history is not None
        try:
            answer = self.history.next_context(standing)
            if answer is None or isinstance(answer, NewContext):
                return answer
            writing = next(answer)
            while True:
                written = yield from self._write(writing, conversation, anchor)
                writing = answer.send(written)
        except StopIteration as end:
            decision: NewContext | None = end.value
            return decision
        except TemplateRefusal as error:
            raise Ended("env_crash", f"a new context is refused: {error}") from None

    def _write(
        self, writing: Writing, conversation: Conversation, anchor: str
    ) -> Generator[Request, Completion, Written]:
        """Has the policy write something behind the last turn; a turn that nobody answers."""
        episode = self.episode
        joined = conversation.join(self._last_ids(), writing.messages)
        row = episode.row
        added = len(joined.token_ids)
        if joined.rewritten is not None:
            row = Row(prompt_ids=joined.rewritten)
        room = min(self.limits.whole_room(row), self.limits.left(episode)) - added
        if room <= 0 or len(row.prompt_ids) > self.limits.prompt_length:
            return Written("", 0)
        episode.row.append_tokens(joined.token_ids)
        if row is not episode.row:
            episode.rows.append(row)
        sampling = self.sampler(episode)
        max_tokens = min(room, sampling.max_tokens, writing.max_tokens)
        asked_at = time.perf_counter()
        completion = yield Sample(row.token_ids, copy_with(sampling, max_tokens=max_tokens))
        engine_seconds = time.perf_counter() - asked_at
        take_completion(episode, completion)
        turn = Turn(
            text=self.tokens.text(completion.token_ids),
            finish_reason=completion.finish_reason,
            tokens=len(completion.token_ids),
            anchor=f"{writing.purpose} {anchor}",
            asked=writing.messages,
            behind=len(episode.turns) - 1,
            engine_seconds=engine_seconds,
            writes=writing.purpose,
            is_trained=writing.is_trained,
        )
        episode.turns.append(turn)
        episode.messages += [*writing.messages, {"role": "assistant", "content": turn.text}]
        return Written(turn.text, turn.tokens)

    def _begin_context(self, new: NewContext) -> None:
        """Goes on in a new row with a prompt of these messages.

        Raises:
            Ended: it is too long, or the template refuses them.
        """
        context = self.context
        try:
            conversation = self.tokens.history(new.messages, self.tools)
            prompt = conversation.prompt()
        except TemplateRefusal as error:
            raise Ended(
                "env_crash", f"the new context ({new.reason}) is refused: {error}"
            ) from None
        if len(prompt) > self.limits.prompt_length:
            raise Ended("overflow", "")
        old = [*context.messages, *context.reply]
        row = self.episode.row
        seam = Seam(
            reason=new.reason,
            dropped=sum(1 for message in old if message not in new.messages),
            tokens=len(row.prompt_ids) + len(row.ids),
            fault=new.fault,
        )
        self.episode.rows.append(Row(prompt_ids=prompt, seam=seam))
        self.context = Context(
            conversation=conversation,
            reply=list(new.messages),
            first_turn=len(self.episode.turns),
        )


def anchor_of(reply: StepReply) -> str:
    """Names the state in which a reply left the environment.

    That is the environment's own name for it, or a digest of what it said.
    """
    if reply.anchor is not None:
        return reply.anchor
    return digest([message["content"] for message in reply.messages])


def digest(value: Any) -> str:
    """Returns 16 characters that stand for a JSON value, the same in every process."""
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()


def ask(episode: Episode, kind: Call, *args: Any) -> Generator[Request, StepReply, StepReply]:
    """Makes the environment answer. Raises EnvironmentGone, or BadRewardFunction to end the run."""
    reply = yield Ask(kind, args)
    episode.env_seconds += reply.seconds
    add_counts(episode.models, reply.usage)
    if reply.failure == "reward_fault":
        raise BadRewardFunction(reply.error)
    if reply.failure:
        raise EnvironmentGone(reply.failure, reply.error)
    return reply


def sample(
    episode: Episode, sampler: Sampler, limits: TurnLimits
) -> Generator[Request, Completion, Completion]:
    """Makes the engine continue the row, and adds what it sampled. Raises Ended."""
    sampling = sampler(episode)
    room = min(limits.room(episode.row), limits.left(episode))
    if room <= 0:
        raise Ended("overflow", "")
    max_tokens = min(room, sampling.max_tokens, limits.max_turn_tokens or room)
    sampling = copy_with(sampling, max_tokens=max_tokens)
    completion = yield Sample(episode.row.token_ids, sampling)
    take_completion(episode, completion)
    return completion


def take_completion(episode: Episode, completion: Completion) -> None:
    """Adds what was sampled to the row. Raises Ended: the engine gave the request up."""
    if completion.finish_reason == "abort":
        raise Ended("engine_error", "the engine aborted the request")
    episode.row.append_sampled(completion, turn=len(episode.turns))
