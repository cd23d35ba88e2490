"""A call as the model wrote it, and the record of what came of it.

Invariant: a record is made once, where the call was executed; the turn, its user and the metrics
read it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from custom.env import Observation

ErrorKind: TypeAlias = Literal[
    "", "unknown_tool", "bad_json", "cut", "bad_arguments", "exception", "timeout"
]
# The name under which calls of no registered tool are counted: a model's inventions are no
# metric's names.
UNKNOWN = "(unknown)"


class WrittenValue(str):
    """Holds an argument of a form that writes no types; the tool's schema says what it stands for.

    `<parameter=n>3</parameter>` is 3 where the schema has an integer, and "3" where it has a text.
    """

    __slots__ = ()


@dataclass(frozen=True)
class ToolCall:
    """Holds a call as the model wrote it.

    `arguments` is text where the model gave only that; it then stands for the tool's one parameter.
    With an `error_kind` the call cannot be executed, and `error` tells the model why. What
    `may_be_text`, since data or code is written so, too, is a call only of a tool that there is.
    `call_id` is the id that the model gave it, in forms that have one.
    """

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)
    error_kind: ErrorKind = ""
    error: str = ""
    may_be_text: bool = field(default=False, compare=False)
    call_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Outcome:
    """Holds what a tool returned or, with an `error_kind`, the text of what went wrong.

    Attributes:
        raised: by the tool's code, and no answer that it means to give (ToolError).
        where: what was raised, in words, with file and line.
    """

    value: Any
    error_kind: ErrorKind = ""
    raised: BaseException | None = field(default=None, compare=False)
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class CallRecord:
    """Holds what came of one call.

    Attributes:
        call: the call as the model wrote it.
        name: a registered tool's, or UNKNOWN.
        value: what the tool returned, or the error's text.
        error_kind: empty where the call succeeded; "no_call" for a turn without a call.
        observation: what the model is shown.
        seconds: the time until then.
        raised: what the tool's code raised, with file and line; "": nothing, or a ToolError.
        chars_left_out: of the result, which was longer than an observation may be.
    """

    call: ToolCall
    name: str
    value: Any
    error_kind: str
    observation: Observation
    seconds: float
    raised: str = ""
    chars_left_out: int = 0

    @property
    def ok(self) -> bool:
        """Returns whether the call succeeded."""
        return not self.error_kind

    @property
    def result(self) -> str:
        """Returns the observation as text."""
        if isinstance(self.observation, str):
            return self.observation
        return "\n".join(message["content"] for message in self.observation)

    def as_info(self) -> dict[str, Any]:
        """Returns the entry for `info["tool_calls"]`, which metrics and reward functions read."""
        info: dict[str, Any] = {
            "name": self.name,
            "ok": self.ok,
            "error_kind": self.error_kind,
            "seconds": self.seconds,
        }
        if self.raised:
            info["raised"] = self.raised
        if self.chars_left_out:
            info["chars_left_out"] = self.chars_left_out
        return info
