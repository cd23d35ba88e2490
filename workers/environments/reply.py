"""Defines the reply of one call to an environment, and its form between processes.

Invariant: whatever a call did, a `StepReply` comes back, and a worker that is gone raises
`WorkerLost`. Only numbers, short texts, the records of tool calls and the task's name are kept of
a step's `info`. Replies travel as JSON behind the number of their request, and are read as data.
"""

import math
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Literal, Protocol

from pydantic import TypeAdapter

from custom.asking import Question
from custom.env import Message
from custom.env_calls import (
    MAX_ERROR_CHARS,
    check_observation,
    check_reward,
    cut_middle,
    describe,
)
from custom.model_usage import Counts, checked_counts
from custom.trial import Trial
from data.texts import printable

Call = Literal[
    "build",
    "trial",
    "reset",
    "restore",
    "step",
    "visit",
    "finish",
    "close",
    "run",
    "answer",
    "give_up",
]
# reward_fault: a reward function failed, which ends the run.
Failure = Literal["", "env_crash", "env_timeout", "reward_fault"]

# So many numbers and texts of a step's info are kept, with names of at most this length; of a long
# text its middle is left out.
MAX_NUMBERS = 32
MAX_TEXTS = 8
MAX_TEXT_CHARS = 8_000
MAX_NAME_CHARS = 64
TASK = "task"
MAX_TOOL_NAME_CHARS = 200
# The kind of a failed call's error that its record does not name.
UNNAMED_ERROR = "unnamed"


class WorkerLost(RuntimeError):
    """Reports that an env worker is gone, with the agent in it."""


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """Holds what came of one call: made where the environment lives, read by the turn loop.

    Attributes:
        messages: what the conversation goes on with.
        replaces_history: of a step: they are all that the conversation then is.
        reward: of a step; of a finish the episode's own, None where the environment's rewards
            stand.
        done: the environment has ended.
        tool_calls: name, ok, error_kind and seconds of each; raised, where a tool's code did, and
            chars_left_out, where its result was cut.
        info: the numbers of a step's info.
        texts: the texts of a reset's or a step's info, such as a hint, but for the task's name.
        task: what a step's info calls the task that is played; "": nothing.
        anchor: `environment.anchor()`, the state that the next turn begins in; None where the class
            has none.
        tools: of a build, the tools' schemas.
        trial: of a trial, what was seen.
        said: of a visit, the text that the function returned.
        failure: the episode is over and its environment gone.
        error: why, in one line and the traceback's last ones.
        strays: children that the environment forked and that came back from a call since the last
            reply; each was ended, and answered nothing.
        usage: what the process asked of models since its last reply, by model; of calls that run
            side by side in one process the first to end has it all.
        questions: the call is not over: it waits for the policy to answer these.
        paid: what answers to earlier questions have earned, by the question's number.
        seconds: the call's own time, in which it computed or waited for something of its own; not
            that in which it waited for its turn, or for a processor.
    """

    messages: list[Message] = field(default_factory=list)
    replaces_history: bool = False
    reward: float | None = None
    done: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    task: str = ""
    anchor: str | None = None
    tools: list[dict[str, Any]] | None = None
    trial: Trial | None = None
    said: str = ""
    failure: Failure = ""
    error: str = ""
    strays: int = 0
    usage: Counts = field(default_factory=dict)
    questions: list[Question] = field(default_factory=list)
    paid: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0

    # The value for an episode that replies once at a time.
    order: ClassVar[str] = ""


class Heard(Protocol):
    """A pool's reply about an episode: a StepReply, or a program's report (features/programs).

    `order` sorts what is said of one episode at the same time.
    """

    @property
    def order(self) -> str: ...


class Pool(Protocol):
    """The turn loop's view of a pool, beside the calls that an episode asks for by name."""

    def poll(self, timeout: float) -> list[tuple[Any, Any]]:
        """Returns what is new, by episode; waits for the first at most `timeout` seconds."""
        ...


REPLY = TypeAdapter(StepReply)
# A request's number, before its reply; it is drawn, and never negative.
NUMBER = struct.Struct("<q")
NUMBER_BITS = 63


def crashed(error: str, seconds: float = 0.0) -> StepReply:
    """Makes the reply of a call that failed; of a long error its beginning."""
    return StepReply(failure="env_crash", error=error[:MAX_ERROR_CHARS], seconds=seconds)


def overdue(kind: Call, seconds: float, line: str = "") -> StepReply:
    """Makes the reply of a call that ran beyond its deadline; `line` is the one that it was in."""
    where = f", in {line}" if line else ""
    return StepReply(
        failure="env_timeout",
        error=f"{kind} was still running at its deadline, after {seconds:.3g} s{where}",
        seconds=seconds,
    )


def held_up(kind: Call, seconds: float, ran: float, limit: float) -> StepReply:
    """Makes the reply of a call that a busy machine kept from its deadline for too long."""
    return StepReply(
        failure="env_timeout",
        error=(
            f"{kind} was still running after {seconds:.3g} s by the wall's clock "
            f"(agent.step_wall_timeout_s), though for {ran:.3g} s of its {limit:.3g} s alone: the "
            "machine is too busy; run fewer environments at once (agent.environment.num_workers)"
        ),
        seconds=seconds,
    )


def tool_calls(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Takes from a step's info the records of its tool calls, those that name their tool.

    An environment's own record may say no more than that: a call without `ok` succeeded unless it
    has an `error_kind` or an `error`, one that failed without a kind is of the kind `unnamed`, and
    one without `seconds` took none.
    """
    calls = info.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return []
    return [_tool_call(call) for call in calls if _is_tool_call(call)]


def _is_tool_call(call: Any) -> bool:
    """Checks whether a record is one, and names its tool."""
    return isinstance(call, Mapping) and isinstance(call.get("name"), str) and bool(call["name"])


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Completes the record of a tool call."""
    kind = call.get("error_kind")
    kind = printable(kind[:MAX_NAME_CHARS]) if isinstance(kind, str) else ""
    has_error = bool(kind or call.get("error"))
    # numpy's truth values, and 1 and 0, are ones too.
    said = call.get("ok")
    ok = not has_error if said is None else bool(said)
    if ok:
        kind = ""
    record: dict[str, Any] = {
        "name": printable(call["name"][:MAX_TOOL_NAME_CHARS]),
        "ok": ok,
        "error_kind": kind if ok or kind else UNNAMED_ERROR,
        "seconds": _seconds(call.get("seconds")),
    }
    if isinstance(call.get("raised"), str):
        record["raised"] = printable(call["raised"][:MAX_ERROR_CHARS])
    left_out = call.get("chars_left_out")
    if type(left_out) is int and left_out > 0:
        record["chars_left_out"] = left_out
    return record


def _seconds(value: Any) -> float:
    """Returns the seconds of a call; 0 where they are no number that a call can take."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return seconds if 0 <= seconds < math.inf else 0.0


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Takes from a step's info its first MAX_NUMBERS finite numbers, true being 1.

    Those under overly long names are left out.
    """
    finite: dict[str, float] = {}
    for key, value in info.items():
        if not isinstance(key, str) or len(key) > MAX_NAME_CHARS:
            continue
        if not isinstance(value, Real):
            continue
        try:
            number = float(value)
        except OverflowError:
            # An int that no float holds.
            continue
        if math.isfinite(number) and len(finite) < MAX_NUMBERS:
            finite[printable(key)] = number
    return finite


def texts(info: Mapping[str, Any]) -> dict[str, str]:
    """Takes from a step's info its first MAX_TEXTS texts, each of MAX_TEXT_CHARS at most.

    The task's name is none of them, and those under overly long names are left out.
    """
    found: dict[str, str] = {}
    for key, value in info.items():
        if not isinstance(key, str) or len(key) > MAX_NAME_CHARS or key == TASK:
            continue
        if isinstance(value, str) and len(found) < MAX_TEXTS:
            found[printable(key)] = cut_middle(printable(value), MAX_TEXT_CHARS)
    return found


def task_name(info: Mapping[str, Any]) -> str:
    """Returns what a step's info calls its task, in MAX_NAME_CHARS; "" where it has no name."""
    name = info.get(TASK)
    return printable(name[:MAX_NAME_CHARS]) if isinstance(name, str) else ""


def numbered(number: int, reply: bytes) -> bytes:
    """Returns a written reply behind the number of its request."""
    return NUMBER.pack(number) + reply


def split_number(answer: bytes) -> tuple[int, bytes]:
    """Returns a request's number and its written reply; the number -1: it is no numbered reply."""
    if len(answer) < NUMBER.size:
        return -1, b""
    (number,) = NUMBER.unpack(answer[: NUMBER.size])
    return number, answer[NUMBER.size :]


def write_reply(reply: StepReply, kind: Call) -> bytes:
    """Writes a reply as JSON; one that cannot be written is an error of the environment."""
    try:
        return REPLY.dump_json(reply)
    except BaseException as error:
        text = f"what {kind} returned cannot be sent to another process: {describe(error)}"
        return REPLY.dump_json(crashed(text, reply.seconds))


def read_reply(answer: bytes) -> StepReply:
    """Reads what `write_reply` wrote.

    It is read as data: code of the policy's may have run where it was made.
    """
    try:
        reply = REPLY.validate_json(answer)
        check_observation(reply.messages, "the reply", max_chars=sys.maxsize)
        check_reward(reply.reward or 0.0, "the reply")
        for question in reply.questions:
            check_observation(question.messages, "the question", max_chars=sys.maxsize)
        for reward in reply.paid.values():
            check_reward(reward, "the reply")
        return replace(
            reply,
            tool_calls=tool_calls(vars(reply)),
            info=numbers(reply.info),
            texts=texts(reply.texts),
            task=task_name(vars(reply)),
            strays=max(0, reply.strays),
            usage=checked_counts(reply.usage),
        )
    # Whatever came is no reply.
    except (ValueError, RecursionError) as error:
        return crashed(
            f"the environment's home sent what is no reply: {type(error).__name__}: {error}"
        )
