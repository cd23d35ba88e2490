"""Action parsers: from what a model wrote to the tool calls in it.

Invariant: `parse` never raises, takes time linear in the text, and returns no call whose name or arguments the text
does not hold. A call that was begun but cannot be read is returned with its `error_kind`, so that the model hears of
it. Code fences and quotations are not special: a call is a call wherever it stands.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from data.texts import registered

__all__ = [
    "ActionParser",
    "FunctionCallingParser",
    "JSONActionParser",
    "ReActActionParser",
    "ToolCall",
    "get_parser",
]

ErrorKind: TypeAlias = Literal[
    "", "unknown_tool", "bad_json", "bad_arguments", "exception", "timeout"
]

# So many values that do not decode are garbage, not calls: nothing is looked for behind them.
MAX_BROKEN = 64

ARGUMENT_KEYS = ("arguments", "parameters", "args", "action_input", "tool_input", "input")
CERTAIN_WRAPPERS = ("tool_calls", "tool_call", "function_call")
OPENAI_KEYS = ("tool_calls", "function_call", "function")
WRAPPER_KEYS, MAX_WRAPPERS = (*CERTAIN_WRAPPERS, "function", "action", "tool"), 5
# `{"name": "Bob"}` and `{"action": "north"}` are data; with arguments beside the name they are calls.
NAMES_ALONE, NAMES_WITH_ARGUMENTS = ("tool", "tool_name"), ("name", "function", "action")

_OBJECT = re.compile(r'\{\s*"')
_CALL_KEY = re.compile(r'"(?:name|tool|tool_name|function|function_call|tool_calls?|action)"\s*:')
_REACT_LABEL = re.compile(
    r"(?m)^[ \t*]*(Thought|Action Input|Action|Observation|Final Answer)[ \t*\d]*:[ \t*]*"
)
# Brackets within the brackets are closed, too.
_REACT_BRACKETS = re.compile(r"([\w.-]+) ?\[((?:[^][]|\[[^][]*+\])*+)(\]?)")
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_SPACE, _SPACE_AND_FENCE = re.compile(r"\s*"), re.compile(r"\s*(?:```(?:json)?\s*)?")
_IDENTIFIER = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ToolCall:
    """Holds a call as the model wrote it.

    `arguments` is text where the model gave only that; it then stands for the tool's one parameter. With an
    `error_kind` the call cannot be executed, and `error` tells the model why.
    """

    name: str
    arguments: dict[str, Any] | str = field(default_factory=dict)
    error_kind: ErrorKind = ""
    error: str = ""


class ActionParser(ABC):
    """Finds the tool calls in a model's text; subclass it for another form."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in order of appearance; empty where there is none."""


class JSONActionParser(ActionParser):
    """Reads JSON objects anywhere in the text: `{"name": "add", "arguments": {"a": 1}}`, also in lists and code fences.

    "tool" and "action" may stand for "name", "parameters", "args", "input" and "action_input" for "arguments". Without
    arguments only `{"tool": …}` is a call. OpenAI's forms are understood too. All other objects are no calls.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls among the outermost JSON objects."""
        return [call for value in _objects(text) for call in _calls_in(value)]


class FunctionCallingParser(ActionParser):
    """Reads the calls that Qwen and Hermes models write in tags, or OpenAI's `tool_calls`.

    In tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the closing tag may be missing, and with a tag in
    the text nothing outside of tags is a call.
    OpenAI's: `{"tool_calls": [{"function": {"name": …, "arguments": "{…}"}}]}`, the single entry or `function_call`.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in tags, else those in OpenAI's form."""
        if "<tool_call>" in text:
            return [call for value in _tagged(text) for call in _calls_in(value, certain=True)]
        if not any(f'"{key}"' in text for key in OPENAI_KEYS):
            return []
        return [call for value in _objects(text) if _is_openai(value) for call in _calls_in(value)]


class ReActActionParser(ActionParser):
    """Reads `Action: add` and, on the next line, `Action Input: {"a": 1}`; also `Action: search[some text]`.

    An input that is no JSON object is passed on as text, without a code fence around it. Without an input the action
    must be a single word.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls of all actions."""
        if "Action" not in text:
            return []
        reader, calls, position, action = _Reader(text), [], 0, ""
        labels = list(_REACT_LABEL.finditer(text))
        # Without labels there is one end.
        for label, end in zip(
            labels, [*(label.start() for label in labels[1:]), len(text)], strict=False
        ):
            # A label inside of a JSON input is none.
            if label.start() < position:
                continue
            kind = label.group(1)
            if action and kind == "Action Input":
                arguments, position = _react_input(reader, label.end(), end)
                calls.append(_call(action, arguments))
                action = ""
                continue
            calls += _react_alone(action)
            action = text[label.end() : end].strip().strip("*`").strip() if kind == "Action" else ""
        return calls + _react_alone(action)


PARSERS: dict[str, Any] = {
    "json": JSONActionParser,
    "react": ReActActionParser,
    "function": FunctionCallingParser,
}


def get_parser(name: str) -> ActionParser:
    """Makes the parser called json, react or function; ValueError names the nearest."""
    return registered(PARSERS, "agent.parser", name)()


# --- Reading values ---


# Stands for a value that does not decode, and says why.
_Broken: TypeAlias = ValueError


class _Reader:
    """Decodes JSON values out of a text, and counts those that fail."""

    # Not strict: models write raw newlines into strings of code.
    decoder = json.JSONDecoder(strict=False)

    def __init__(self, text: str) -> None:
        self.text, self.broken = text, 0

    def read(self, start: int) -> tuple[Any, int]:
        """Returns (value, its end), or (_Broken, where it broke: nothing before that can begin another call)."""
        try:
            return self.decoder.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            self.broken += 1
            return _Broken(f"{error.msg} at character {error.pos - start}"), error.pos
        # Thousands of levels or digits: garbage up to the end.
        except (RecursionError, ValueError):
            self.broken = MAX_BROKEN
            return _Broken("nested too deeply, or a number too long"), len(self.text)


def _objects(text: str) -> Iterator[Any]:
    """Yields the outermost JSON objects; `_Broken` for those that break after a key that calls have."""
    reader, position = _Reader(text), 0
    while reader.broken < MAX_BROKEN and (found := _OBJECT.search(text, position)):
        value, position = reader.read(found.start())
        if not isinstance(value, _Broken) or _CALL_KEY.search(text, found.start(), position):
            yield value


def _tagged(text: str) -> Iterator[Any]:
    """Yields the JSON values behind each `<tool_call>`; `_Broken` where there is none."""
    reader, tag = _Reader(text), "<tool_call>"
    position = text.find(tag)
    while position >= 0 and reader.broken < MAX_BROKEN:
        value, position = reader.read(_skip(text, position + len(tag)))
        yield value
        position = text.find(tag, position)


def _skip(text: str, start: int, what: re.Pattern[str] = _SPACE) -> int:
    found = what.match(text, start)
    return found.end() if found else start


# --- From values to calls ---


def _calls_in(value: Any, certain: bool = False, depth: int = 0) -> list[ToolCall]:
    """Returns the calls that a decoded value stands for; where one is `certain`, anything else is a bad call."""
    if isinstance(value, _Broken):
        return [ToolCall("", error_kind="bad_json", error=f"the call is not valid JSON: {value}")]
    if isinstance(value, list) and depth < MAX_WRAPPERS:
        return [call for item in value for call in _calls_in(item, certain, depth + 1)]
    if isinstance(value, dict) and depth < MAX_WRAPPERS:
        for key in WRAPPER_KEYS:
            inner = value.get(key)
            if isinstance(inner, dict) or (key == "tool_calls" and isinstance(inner, list)):
                return _calls_in(inner, certain or key in CERTAIN_WRAPPERS, depth + 1)
        name, arguments = _name_and_arguments(value, certain)
        if name:
            return [_call(name, arguments)]
    if not certain:
        return []
    return [
        ToolCall(
            "", error_kind="bad_json", error='a call is an object {"name": …, "arguments": {…}}'
        )
    ]


def _name_and_arguments(value: dict[str, Any], certain: bool) -> tuple[str, Any]:
    """Returns a call's name, empty where the object is none, and its arguments."""
    key = next((key for key in ARGUMENT_KEYS if key in value), None)
    names = (*NAMES_ALONE, *NAMES_WITH_ARGUMENTS) if certain or key else NAMES_ALONE
    name = next((value[name] for name in names if isinstance(value.get(name), str)), "")
    return name.strip(), value[key] if key else {}


def _call(name: str, arguments: Any) -> ToolCall:
    """Makes a call of arguments as an object, as a JSON text of one, or as text for the only parameter."""
    if isinstance(arguments, _Broken):
        return ToolCall(
            name, error_kind="bad_json", error=f"the arguments are not valid JSON: {arguments}"
        )
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        value, end = _Reader(arguments).read(_skip(arguments, 0))
        rest = "" if isinstance(value, _Broken) else arguments[end:].strip()
        return _call(name, _Broken("there is text behind the object") if rest else value)
    if arguments is None:
        return ToolCall(name)
    if not isinstance(arguments, dict | str):
        return ToolCall(
            name, error_kind="bad_arguments", error="the arguments must be a JSON object"
        )
    return ToolCall(name, arguments)


def _is_openai(value: Any) -> bool:
    return isinstance(value, _Broken) or any(
        isinstance(value.get(key), dict | list) for key in OPENAI_KEYS
    )


# --- ReAct ---


def _react_input(reader: _Reader, start: int, end: int) -> tuple[Any, int]:
    """Returns the input that begins at `start`, and its end: a JSON value's, else `end`, the next label."""
    begin = _skip(reader.text, start, _SPACE_AND_FENCE)
    if reader.text.startswith("{", begin) and begin < end:
        return (
            (_Broken("too many broken values"), end)
            if reader.broken >= MAX_BROKEN
            else reader.read(begin)
        )
    content = reader.text[start:end].strip()
    fenced = _FENCED.fullmatch(content)
    return (fenced.group(1) if fenced else content), end


def _react_alone(action: str) -> list[ToolCall]:
    """Returns the call of an action without input."""
    if found := _REACT_BRACKETS.match(action):
        name, text, closed = found.groups()
        return [_call(name, text if closed else _Broken("the bracket is not closed"))]
    return [ToolCall(action)] if _IDENTIFIER.fullmatch(action) else []
