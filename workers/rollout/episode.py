"""Defines an episode: its rows and turns, its limits, and what it asks for while it is played.

It is played by a coroutine (episode_play.py), and keeps this of a conversation:

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
from array import array
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from custom.env import BadRewardFunction, Message
from custom.model_usage import Counts, add_counts
from data.turn_tokens import Conversation, Tools, TurnTokens
from workers.environments.reply import Call, StepReply
from workers.rollout.begin import Begin
from workers.rollout.engine import Completion, Sampling, VersionSpan, copy_with
from workers.rollout.questions import Questions
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


class PromptSource(NamedTuple):
    """Holds what a prompt was rendered from."""

    messages: list[Message]
    tools: Tools = None


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
        source: what its prompt was rendered from; None: nobody knows.
        aside: it is none of the episode's own conversation: its environment asked for it.
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
    source: PromptSource | None = field(default=None, compare=False, repr=False)
    aside: bool = False
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
    until its answer. A text that a history asked the policy for is a turn that no environment
    reads: it `writes` that, such as a summary, and was `asked` for it. So is a text that the
    environment asked for, which stands in a row `aside`. With `is_trained` false its tokens get
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
    aside: bool = False
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
        rows: one, or more where the chat template rewrites history or a new context begins, the
            last of which grows; beside these the rows that its environment asked for.
        messages: the whole conversation, of which `initial_messages` came from the reset.
        reset_texts: the texts of the reset's info, by name.
        final_reward: what replaces the rewards of the turns, if the environment gave it.
        asked: what is counted of the questions that its environment asked the policy.
        program: of a program, its numbers and the last lines of its output, by name.
        attempt: counts restarts after a crash; `failed_attempts` holds what was played before it.
        ending: one of ENDINGS; of an answer to a prompt the engine's finish reason.
        error: why it failed; `first_error` is of the first attempt that did.
        env_seconds: the environment's own time.
        models: what was asked of models beside the policy, in all attempts.
        seconds: wall time of the last attempt.
        begin: where it begins in the midst of another episode, whose branch it is; None: it is
            none.
        branches: of this episode.
        states: texts that stand for the environment's state before each turn that it was asked
            for, where branches are to begin there (branches.py); "" for one that was not kept.
    """

    group: int
    sample: int
    spec: int = 0
    seed: int = 0
    task: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    initial_messages: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    reset_texts: dict[str, str] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    final_reward: float | None = None
    asked: dict[str, float] = field(default_factory=dict)
    program: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    failed_attempts: list[FailedAttempt] = field(default_factory=list)
    ending: str = ""
    error: str = ""
    first_error: str = ""
    env_seconds: float = 0.0
    models: Counts = field(default_factory=dict)
    seconds: float = 0.0
    begin: Begin | None = None
    branches: list[Episode] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    @property
    def row(self) -> Row:
        """Returns the row that grows."""
        last = self.rows[-1]
        if not last.aside:
            return last
        return [row for row in self.rows if not row.aside][-1]

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

    def taken_completion(self) -> Completion | None:
        """Returns the next turn's completion where it was sampled in another episode."""
        if self.begin is None or len(self.turns) >= self.begin.turn:
            return None
        return self.begin.prefix[len(self.turns)]

    def left_of_branch(self) -> int:
        """Counts the tokens that a branch may still sample."""
        if self.begin is None:
            return sys.maxsize
        return self.begin.left(sum(turn.tokens for turn in self.turns[self.begin.turn :]))

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
        self.asked = {}
        self.states = []
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


class Samples(NamedTuple):
    """Asks the engine to continue several ids at once; all or none are sampled.

    Each is answered by its Completion when that is there, the further ones where the episode makes
    a request that asks for nothing (`Several()`); or it raises Ended.
    """

    samples: Sequence[Sample]


class Several(NamedTuple):
    """Makes the requests of an episode that may have several on their way.

    First the turns in `dropped` are given up, by their numbers; then the pool is told what `asks`
    say; then the turn `sample`, if any, is sampled. Whatever then comes for the episode, a
    completion or what its environment says, resumes it.
    """

    asks: Sequence[Ask] = ()
    sample: Sample | None = None
    dropped: Sequence[int] = ()


Request = Sample | Ask | Samples | Several
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


# What a kind of episodes plays with.


def begin_row(
    episode: Episode, messages: list[Message], conversation: Conversation, limits: TurnLimits
) -> bool:
    """Begins the first row with the reset's messages; returns whether the prompt fits."""
    episode.initial_messages = messages
    episode.messages = list(messages)
    prompt = conversation.prompt()
    source = PromptSource(messages, conversation.tools)
    # Before those that the environment asked for in its reset.
    episode.rows.insert(0, Row(prompt_ids=prompt[: limits.prompt_length], source=source))
    return len(prompt) <= limits.prompt_length


def ask(
    episode: Episode, kind: Call, *args: Any, questions: Questions | None = None
) -> Generator[Request, Any, StepReply]:
    """Makes the environment answer.

    Args:
        questions: answers what the environment asks meanwhile; None: that is refused.

    Raises:
        EnvironmentGone: it failed, or waits for answers that there will not be.
        BadRewardFunction: to end the run.
    """
    questions = questions or Questions()
    reply: StepReply = yield Ask(kind, args)
    _take_reply(episode, reply, questions)
    seconds = 0.0
    while reply.questions:
        try:
            answers = yield from questions.answer(reply.questions)
        except Ended as end:
            ending, error = end.args
            yield Ask("give_up", (error,))
            raise EnvironmentGone(ending, error) from None
        seconds += reply.seconds
        reply = yield Ask("answer", (answers,))
        _take_reply(episode, reply, questions)
    # Those of the call's earlier parts are its own, too.
    return replace(reply, seconds=seconds + reply.seconds) if seconds else reply


def _take_reply(episode: Episode, reply: StepReply, questions: Questions) -> None:
    """Takes in what a part of a call says of the episode.

    Raises:
        EnvironmentGone, BadRewardFunction: as of `ask`.
    """
    episode.env_seconds += reply.seconds
    add_counts(episode.models, reply.usage)
    if reply.failure == "reward_fault":
        raise BadRewardFunction(reply.error)
    if reply.failure:
        raise EnvironmentGone(reply.failure, reply.error)
    if reply.paid:
        questions.pay(reply.paid)


def sample(
    episode: Episode, sampler: Sampler, limits: TurnLimits
) -> Generator[Request, Completion, Completion]:
    """Makes the engine continue the row, and adds what it sampled. Raises Ended.

    In a branch the turns before it are taken from its episode.
    """
    taken = episode.taken_completion()
    if taken is not None:
        take_completion(episode, taken)
        return taken
    sampling = sampler(episode)
    room = min(limits.room(episode.row), limits.left(episode), episode.left_of_branch())
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
