"""Messages between the server, the pool and the episode of a program.

    program --HTTP--> server: AskedCompletion --> pool: Asked -----------> episode (play.py)
    program <--HTTP-- server: AnsweredCompletion <-- pool: Answer <------- episode

Invariant: what goes to an episode is plain data, which the leader of a tensor-parallel group sends
to the other ranks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from workers.rollout.speaker import NOBODY, Speaker

Json = dict[str, Any]
# Why a request gets no answer: there is no room for its conversation; the chat template refuses it;
# the engine does; its sampling is not the run's; the episode takes no further turn.
Refusal = Literal["", "context_length", "template", "engine", "sampling", "ended"]
FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, kw_only=True)
class Earned:
    """Holds what a program says of one of its conversations at its end.

    Attributes:
        reward: of the conversation as a whole; None: it has none of its own.
        trained: its tokens are trained on.
    """

    reward: float | None = None
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class AskedCompletion:
    """Holds a request in the one form that all protocols come down to.

    Attributes:
        messages: of the whole conversation, with text contents.
        prompt_ids: in place of messages: the ids that are to be continued.
        tools: functions, as chat templates take them.
        reads_calls: tool calls in the answer are to be told apart from its text.
        forces_call: the client wants a call, whatever the policy would choose.
        token_rules: names of settings by which the client wants some tokens, or forbids them.
        max_tokens: the longest answer that the client wants.
        stop: texts, any of which ends the answer.
        stream, usage_in_stream, wants_log_probs, shows_thinking: how it is to be answered.
        model: what the client calls the policy.
        sampling: the client's own settings, by OpenAI's names.
        ignored: settings of the client's that have no effect.
        speaker: whose turn it is, of a program in which several agents speak.
        only_counts: the client wants to know how many tokens its request has, and no answer.
        namespaces: of tools that stand in one, by the name that the policy knows: its name, and
            the tool's in it.
    """

    messages: list[Json] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    tools: list[Json] | None = None
    reads_calls: bool = True
    forces_call: bool = False
    token_rules: tuple[str, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_in_stream: bool = False
    wants_log_probs: bool = False
    shows_thinking: bool = True
    model: str = "policy"
    sampling: dict[str, float] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    speaker: Speaker = NOBODY
    only_counts: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Tells an episode that its program asks for a turn.

    Attributes:
        number: of the request, counted from 1 in an attempt.
        sampling, forces_call, token_rules: what the client wants otherwise than the run, maybe.
        model: what the client calls the policy.
        trained: its answer is trained on; of a helper's it is not.
        only_counts: no turn is asked for, but how many tokens the request has.
        reward: of the answer behind which this request goes on; None: it says nothing of that.
        seconds: that the program worked since it was answered last.
    """

    number: int
    messages: list[Json]
    prompt_ids: tuple[int, ...] = ()
    tools: list[Json] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    wants_log_probs: bool = False
    sampling: dict[str, float] = field(default_factory=dict)
    forces_call: bool = False
    token_rules: tuple[str, ...] = ()
    speaker: Speaker = NOBODY
    model: str = "policy"
    trained: bool = True
    only_counts: bool = False
    reward: float | None = None
    seconds: float = 0.0

    @property
    def content(self) -> str:
        """Says what is asked; a retry says the same."""
        content = [
            self.messages,
            self.prompt_ids,
            self.tools,
            self.max_tokens,
            self.stop,
            self.speaker.agent,
        ]
        return json.dumps(content, default=str)

    @property
    def order(self) -> str:
        """Sorts what is asked at the same time by what it is, not by when it came."""
        return f"asked {self.content} {self.number:09d}"


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Tells an episode that nobody takes the answer to a request any more."""

    number: int

    @property
    def order(self) -> str:
        """Sorts it behind what is asked."""
        return f"gone {self.number:09d}"


@dataclass(frozen=True, kw_only=True)
class Rewarded:
    """Tells an episode the reward of an answer.

    Attributes:
        number: of the answer's request; None: the last answer that its speaker has had.
        speaker: who says so.
        by_refused: the header says so of a request that was refused before the episode heard of it.
    """

    reward: float
    number: int | None = None
    speaker: Speaker = NOBODY
    by_refused: bool = False

    @property
    def order(self) -> str:
        """Sorts it behind what is asked; a refused request's before that, which may say it anew."""
        return "a header" if self.by_refused else "rewarded"


@dataclass(frozen=True, kw_only=True)
class Exited:
    """Tells an episode that its program has ended, or had to be ended; it is the last that is told.

    Attributes:
        reward: what the program said that it earned; None: nothing.
        failure: the program crashed or ran out of time, and is gone already.
        error: why.
        undelivered: the numbers of requests whose answers nobody took.
        earned: by the names of its conversations, what each earned; `reward` is then no turn's.
        metrics: numbers of its own, by name.
        record: what is kept of it: exit code, ends of its output and errors, counts.
        seconds: that it worked since it was answered last.
    """

    reward: float | None = None
    failure: Literal["", "env_crash", "env_timeout"] = ""
    error: str = ""
    undelivered: tuple[int, ...] = ()
    earned: Mapping[str, Earned] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    record: Json = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def order(self) -> str:
        """Sorts it behind all else."""
        return "~"


ProgramEvent = Asked | Gone | Rewarded | Exited


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds what the policy sampled for a request, or why nothing was.

    Attributes:
        prompt_ids: that the engine was given; of a request for token ids, else empty.
        prompt_tokens: how many there were.
        token_texts: where log-probs are wanted, each sampled token as text.
        stop: the stop text that ended it.
    """

    text: str = ""
    finish_reason: str = "stop"
    token_ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    prompt_tokens: int = 0
    token_texts: tuple[str, ...] = ()
    stop: str | None = None
    refusal: Refusal = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Call:
    """Holds a tool call as a client gets it; `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class AnsweredCompletion:
    """Holds an answer as a client sees it, in the one form that all protocols make theirs of."""

    id: str
    text: str
    thinking: str = ""
    calls: Sequence[Call] = ()
    answer: Answer

    @property
    def finish_reason(self) -> FinishReason:
        """Returns why it ended, in OpenAI's words."""
        if self.answer.finish_reason == "length":
            return "length"
        return "tool_calls" if self.calls else "stop"
