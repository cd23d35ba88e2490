"""One episode, as a coroutine that asks and is answered: reset, then sample and step until done.

It is answered by the turn loop (base.py). What it keeps of a conversation:

    token_ids     = P0 P1 | A0 A1 A2 | E0 E1 | A3 A4        P: prompt, A: sampled, E: the environment's reply
    response_mask =         1  1  1    0  0    1  1
    turn_ids      =         0  0  0   -1 -1    1  1

Invariants: what the policy sampled is kept as ids; what the engine sees at a turn is what the row holds so far. A
template that rewrites history continues the episode in a new row. The limits end this:

    limit                is reached                              then
    max_turn_tokens      inside a turn                           the turn is closed (its end-of-turn token gets mask 0)
                                                                 and played
    response_length, or  inside a turn, or no room for the next  the episode ends as `overflow` with what it has; a turn
    max_model_len                                                that was cut is not played, as its action is not whole
    prompt_length        by a first prompt, or a rewritten one   `overflow`
    max_turn             after a turn was played                 `max_turns`
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from custom.env import Message
from data.turn_tokens import TemplateRefusal, Tools, TurnTokens
from workers.environments.env_server import Call, StepReply
from workers.rollout.engine import Completion, Sampling

FAILURES = ("env_crash", "env_timeout", "engine_error")
ENDINGS = ("done", "max_turns", "overflow", *FAILURES)


class Span(NamedTuple):
    """Says which response tokens, from `start` up to `end`, were sampled in a turn, by weights of which version."""

    start: int
    end: int
    turn: int
    version: int = 0


@dataclass(kw_only=True)
class Row:
    """Is one training row while it grows, in eight bytes a token of the response; `prompt_ids` never changes.

    `ids` and `own_log_probs` are of the response, what was sampled follows from `spans`, and `reward_at` has a reward
    by its position. `record` makes lists with an entry a token.
    """

    prompt_ids: list[int]
    ids: array[int] = field(default_factory=lambda: array("i"))
    own_log_probs: array[float] = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    reward_at: dict[int, float] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Returns lists with an entry a token, as JSON holds them; log-probs are 0 on what nobody sampled."""
        turns = [-1] * len(self.ids)
        for start, end, turn, _ in self.spans:
            turns[start:end] = [turn] * (end - start)
        return {
            "prompt_ids": self.prompt_ids,
            "response_ids": self.ids.tolist(),
            "response_mask": [int(turn >= 0) for turn in turns],
            "log_probs": self.own_log_probs.tolist(),
            "turn_ids": turns,
            "rewards": [self.reward_at.get(place, 0.0) for place in range(len(turns))],
        }

    @property
    def token_ids(self) -> list[int]:
        """Returns all that the engine is to continue."""
        return [*self.prompt_ids, *self.ids]

    def sampled_in(self, turn: int) -> list[int]:
        """Lists the ids that were sampled in a turn."""
        return [
            id_
            for span in self.spans
            if span.turn == turn
            for id_ in self.ids[span.start : span.end]
        ]

    def append_sampled(self, completion: Completion, turn: int) -> None:
        """Adds what the policy sampled in a turn."""
        start = len(self.ids)
        self.append_given(completion.token_ids, completion.log_probs)
        parts = completion.versions or ((0, 0, len(completion.token_ids)),)
        self.spans += [
            Span(start + begin, start + end, turn, version)
            for version, begin, end in parts
            if end > begin
        ]

    def append_given(self, token_ids: list[int], log_probs: list[float] | None = None) -> None:
        """Adds tokens; without log-probs nobody sampled them."""
        self.ids.extend(token_ids)
        self.own_log_probs.extend(log_probs or [0.0] * len(token_ids))


@dataclass(kw_only=True)
class Turn:
    """Holds what the policy wrote in one turn, the state it began in, and the environment's reply, if it gave one."""

    text: str
    finish_reason: str
    reply: StepReply | None = None
    anchor: str = ""


@dataclass(kw_only=True)
class Episode:
    """Is one conversation with an environment.

    `spec` is the environment's index, `seed` its seed, `task` what else its reset is given; `attempt` counts restarts
    after a crash, `first_error` is of the first attempt that failed. `messages` hold all that was said, of which
    `initial_messages` came from the reset.
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
    attempt: int = 0
    ending: str = ""
    error: str = ""
    first_error: str = ""
    env_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def row(self) -> Row:
        """Is the row that grows."""
        return self.rows[-1]

    def add_reward(self, reward: float) -> None:
        """Adds a reward on the last token that the policy sampled; dropped where it sampled none."""
        if sampled := [row for row in self.rows if row.spans]:
            row, last = sampled[-1], sampled[-1].spans[-1].end - 1
            row.reward_at[last] = row.reward_at.get(last, 0.0) + reward

    def restart(self) -> None:
        """Forgets what was played."""
        self.rows, self.initial_messages, self.messages, self.turns = [], [], [], []
        self.attempt, self.ending, self.error = self.attempt + 1, "", ""


@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """Bounds turns and episodes: in tokens, but for `max_turn` (turns) and `max_refills` (restarts after a crash)."""

    prompt_length: int
    response_length: int
    max_model_len: int
    max_turn: int | None = None
    max_turn_tokens: int | None = None
    max_refills: int = 0

    def room(self, row: Row) -> int:
        """Counts the tokens that the row may still take."""
        return min(self.response_length, self.max_model_len - len(row.prompt_ids)) - len(row.ids)


class Sample(NamedTuple):
    """Asks the engine to continue the ids; it is answered by a Completion, or raises Ended."""

    token_ids: list[int]
    sampling: Sampling


class Ask(NamedTuple):
    """Asks the environment, by a call of the pool with these arguments; it is answered by a StepReply."""

    kind: Call
    args: tuple[Any, ...]


Request = Sample | Ask
Play = Generator[Request, Any, None]
Sampler = Callable[[Episode], Sampling]


class Ended(Exception):
    """Says how the episode ends, and with which error; the environment, if there is one, is still to be finished."""


class EnvironmentGone(Exception):
    """Says how the environment, which is gone, has failed, and with which error."""


def play_episode(
    episode: Episode,
    sampler: Sampler,
    limits: TurnLimits,
    tokens: TurnTokens | None,
    tools: Sequence[Tools],
) -> Play:
    """Plays an episode in its environment, from the reset to the end, which is left in `episode.ending`.

    Args:
        tokens: None: the episode is a prompt and its answer.
        tools: per environment, its tools' schemas.
    """
    try:
        if tokens is None:
            episode.ending = (yield from sample(episode, sampler, limits)).finish_reason
            return
        episode.ending, episode.error = yield from take_turns(
            episode, sampler, limits, tokens, tools[episode.spec]
        )
        reply = yield from ask(episode, "finish", episode.ending)
        if reply.reward is not None and episode.ending not in FAILURES:
            # The episode's own replaces those of its turns.
            for row in episode.rows:
                row.reward_at = {}
            episode.add_reward(reply.reward)
    except (Ended, EnvironmentGone) as end:
        episode.ending, episode.error = end.args
    if not episode.rows:
        episode.rows.append(Row(prompt_ids=[]))


def take_turns(
    episode: Episode, sampler: Sampler, limits: TurnLimits, tokens: TurnTokens, tools: Tools
) -> Generator[Request, Any, tuple[str, str]]:
    """Samples and steps until something ends the episode; returns the ending, and the error if there was one."""
    reply = yield from ask(episode, "reset", episode.spec, episode.seed, episode.task)
    try:
        episode.initial_messages, episode.messages = reply.messages, list(reply.messages)
        prompt = tokens.prompt(reply.messages, tools)
        episode.rows.append(Row(prompt_ids=prompt[: limits.prompt_length]))
        if len(prompt) > limits.prompt_length:
            return "overflow", ""
        while True:
            completion = yield from sample(episode, sampler, limits)
            text = tokens.text(completion.token_ids)
            episode.turns.append(
                Turn(text=text, finish_reason=completion.finish_reason, anchor=anchor_of(reply))
            )
            if completion.finish_reason == "length" and limits.room(episode.row) <= 0:
                return "overflow", ""
            reply = yield from ask(episode, "step", text)
            episode.turns[-1].reply = reply
            episode.add_reward(reply.reward or 0.0)
            if reply.done:
                return "done", ""
            if limits.max_turn is not None and len(episode.turns) >= limits.max_turn:
                return "max_turns", ""
            join(episode, reply.messages, limits, tokens, tools)
    except Ended as end:
        return end.args
    # What the environment said does not fit into the conversation.
    except TemplateRefusal as error:
        return "env_crash", str(error)


def anchor_of(reply: StepReply) -> str:
    """Names the state that a reply left the environment in: its own name for it, or a digest of what it said."""
    return (
        digest([message["content"] for message in reply.messages])
        if reply.anchor is None
        else reply.anchor
    )


def digest(said: Any) -> str:
    """Returns 16 characters that stand for what was said, the same in every process."""
    return hashlib.blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()


def ask(episode: Episode, kind: Call, *args: Any) -> Generator[Request, StepReply, StepReply]:
    """Has the environment answer. Raises EnvironmentGone."""
    reply = yield Ask(kind, args)
    episode.env_seconds += reply.seconds
    if reply.failure:
        raise EnvironmentGone(reply.failure, reply.error)
    return reply


def sample(
    episode: Episode, sampler: Sampler, limits: TurnLimits
) -> Generator[Request, Completion, Completion]:
    """Has the engine continue the row, and adds what it sampled. Raises Ended."""
    sampling, room = sampler(episode), limits.room(episode.row)
    if room <= 0:
        raise Ended("overflow", "")
    most = min(room, sampling.max_tokens, limits.max_turn_tokens or room)
    completion = yield Sample(episode.row.token_ids, replace(sampling, max_tokens=most))
    if completion.finish_reason == "abort":
        raise Ended("engine_error", "the engine aborted the request")
    episode.row.append_sampled(completion, len(episode.turns))
    return completion


def join(
    episode: Episode, new: list[Message], limits: TurnLimits, tokens: TurnTokens, tools: Tools
) -> None:
    """Joins the environment's messages to the row; where the template rewrites history they start a new one.

    Raises Ended where there is no room.
    """
    row, answer = episode.row, {"role": "assistant", "content": episode.turns[-1].text}
    joined = tokens.join(episode.messages, row.sampled_in(len(episode.turns) - 1), new, tools)
    episode.messages += [answer, *new]
    prompt = joined.rewritten
    full = (
        len(joined.token_ids) >= limits.room(row)
        if prompt is None
        else len(prompt) > limits.prompt_length
    )
    if full:
        raise Ended("overflow", "")
    row.append_given(joined.token_ids)
    if prompt is not None:
        episode.rows.append(Row(prompt_ids=prompt))


def unfinished(loop: Any) -> str:
    """Describes a turn loop that stands still: its oldest episode with the last turn, and what waits for what."""
    queue = {key: len(loop.plays[key][1].row.token_ids) for key in sorted(loop.sampling)}
    waiting = sum(len(batch.waiting) for batch in loop.batches)
    lines = [f"the engine's queue: {len(queue)} turns; tokens by episode: {queue}"]
    lines += [
        f"with environments: episodes {sorted(loop.stepping)}",
        f"not begun: {waiting} episodes",
    ]
    for key in sorted(loop.plays, key=loop.started.__getitem__)[:1]:
        episode, age = loop.plays[key][1], time.perf_counter() - loop.started[key]
        named = f"episode {key} (environment {episode.spec}, seed {episode.seed}, attempt {episode.attempt})"
        last = episode.turns[-1] if episode.turns else "it has none"
        lines.append(
            f"the oldest: {named}, begun {age:.0f} s ago, {len(episode.turns)} turns, the last: {last}"
        )
    return "\n".join(lines)
