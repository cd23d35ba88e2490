"""One episode, as a coroutine that asks and is answered: reset, then sample and step until done.

It is answered by the turn loop (turn_loop.py). It keeps this of a conversation:

    token_ids     = P0 P1 | A0 A1 A2 | E0 E1 | A3 A4        P: prompt, A: sampled, E: environment
    response_mask =         1  1  1    0  0    1  1
    turn_ids      =         0  0  0   -1 -1    1  1

Invariants: what the policy sampled is kept as ids; what the engine sees at a turn is what the row
holds so far. A template that rewrites history continues the episode in a new row. The limits end
this:

    limit                is reached               then
    max_turn_tokens      inside a turn            the turn is closed (its end-of-turn token gets
                                                  mask 0) and played
    response_length, or  inside a turn, or there  the episode ends as `overflow` with what it has;
    max_model_len        is no room for the next  a turn that was cut is not played, as its action
                                                  is not whole
    prompt_length        by a first prompt, or a  `overflow`
                         rewritten one
    max_turn             after a turn was played  `max_turns`
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from custom.env import BadRewardFunction, Message
from custom.model_usage import Counts, add_counts
from data.cut_text import CutText
from data.turn_tokens import Conversation, TemplateRefusal, Tools, TurnTokens
from workers.environments.reply import Call, StepReply
from workers.rollout.engine import Completion, Sampling, VersionSpan, copy_with
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
        routed_experts: the engine's choices for the row's tokens from the first on, as far as it
            said; see `Completion`. A token keeps those of the turn in which it was computed first.
    """

    prompt_ids: list[int]
    ids: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    reward_at: dict[int, float] = field(default_factory=dict)
    speaker: Speaker = NOBODY
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
    until its answer.
    """

    text: str
    finish_reason: str
    tokens: int = 0
    reply: StepReply | None = None
    anchor: str = ""
    asked: list[Message] | None = None
    behind: int | None = None
    engine_seconds: float = 0.0


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
        rows: one, or more where the chat template rewrites history; the last one grows.
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

    def add_reward(self, reward: float) -> None:
        """Adds a reward on the last token of the last turn; drops it where nothing was sampled."""
        sampled = [row for row in self.rows if row.spans]
        if sampled:
            row = max(sampled, key=lambda row: row.spans[-1].turn)
            last = row.spans[-1].end - 1
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

    `max_turn` counts turns, `max_refills` restarts after a crash.
    """

    prompt_length: int
    response_length: int
    max_model_len: int
    max_turn: int | None = None
    max_turn_tokens: int | None = None
    max_refills: int = 0

    def room(self, row: Row) -> int:
        """Counts the tokens that the row may still take."""
        longest_response = min(self.response_length, self.max_model_len - len(row.prompt_ids))
        return longest_response - len(row.ids)


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
) -> Play:
    """Plays an episode in its environment, from the reset to `episode.ending`.

    Args:
        tokens: None: the episode is a prompt and its answer.
        tools: per environment, its tools' schemas.
    """
    try:
        if tokens is None:
            completion = yield from sample(episode, sampler, limits)
            episode.ending = completion.finish_reason
            return
        episode.ending, episode.error = yield from take_turns(
            episode, sampler, limits, tokens, tools[episode.spec]
        )
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


def take_turns(
    episode: Episode, sampler: Sampler, limits: TurnLimits, tokens: TurnTokens, tools: Tools
) -> Generator[Request, Any, tuple[str, str]]:
    """Samples and steps until something ends the episode; returns the ending and the error."""
    reply = yield from ask(episode, "reset", episode.spec, episode.seed, episode.task)
    try:
        conversation = tokens.conversation(reply.messages, tools)
        if not begin_row(episode, reply.messages, conversation, limits):
            return "overflow", ""
        while True:
            asked_at = time.perf_counter()
            completion = yield from sample(episode, sampler, limits)
            engine_seconds = time.perf_counter() - asked_at
            text = tokens.text(completion.token_ids)
            turn = Turn(
                text=text,
                finish_reason=completion.finish_reason,
                tokens=len(completion.token_ids),
                anchor=anchor_of(reply),
                engine_seconds=engine_seconds,
            )
            episode.turns.append(turn)
            if completion.finish_reason == "length" and limits.room(episode.row) <= 0:
                return "overflow", ""
            is_cut = completion.finish_reason == "length"
            reply = yield from ask(episode, "step", CutText(text) if is_cut else text)
            turn.reply = reply
            episode.add_reward(reply.reward or 0.0)
            if reply.done:
                return "done", ""
            if limits.max_turn is not None and len(episode.turns) >= limits.max_turn:
                return "max_turns", ""
            join(episode, reply.messages, conversation, limits)
    except Ended as end:
        return end.args
    # The environment's words do not fit into the conversation.
    except TemplateRefusal as error:
        return "env_crash", str(error)


def begin_row(
    episode: Episode, messages: list[Message], conversation: Conversation, limits: TurnLimits
) -> bool:
    """Begins the first row with the reset's messages; returns whether the prompt fits."""
    episode.initial_messages = messages
    episode.messages = list(messages)
    prompt = conversation.prompt()
    episode.rows.append(Row(prompt_ids=prompt[: limits.prompt_length]))
    return len(prompt) <= limits.prompt_length


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
    room = limits.room(episode.row)
    if room <= 0:
        raise Ended("overflow", "")
    max_tokens = min(room, sampling.max_tokens, limits.max_turn_tokens or room)
    sampling = copy_with(sampling, max_tokens=max_tokens)
    completion = yield Sample(episode.row.token_ids, sampling)
    if completion.finish_reason == "abort":
        raise Ended("engine_error", "the engine aborted the request")
    episode.row.append_sampled(completion, turn=len(episode.turns))
    return completion


def join(
    episode: Episode, new_messages: list[Message], conversation: Conversation, limits: TurnLimits
) -> None:
    """Joins the environment's messages to the row.

    Where the template rewrites history they start a new row. Raises Ended where there is no room.
    """
    row = episode.row
    sampled_ids = row.sampled_in(len(episode.turns) - 1)
    joined = conversation.join(sampled_ids, new_messages)
    answer = {"role": "assistant", "content": episode.turns[-1].text}
    episode.messages += [answer, *new_messages]
    rewritten_prompt = joined.rewritten
    if rewritten_prompt is None:
        is_full = len(joined.token_ids) >= limits.room(row)
    else:
        is_full = len(rewritten_prompt) > limits.prompt_length
    if is_full:
        raise Ended("overflow", "")
    row.append_tokens(joined.token_ids)
    if rewritten_prompt is not None:
        episode.rows.append(Row(prompt_ids=rewritten_prompt))
