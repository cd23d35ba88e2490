"""Action parsers: from what a model wrote to the tool calls in it.

Invariant: `parse` never raises, takes time linear in the text, and returns no call whose name or
arguments the text does not hold. A call that was begun but cannot be read is returned with its
`error_kind`, so that the model hears of it. Code fences and quotations are not special: a call is a
call wherever it stands.
"""

import re
from dataclasses import replace
from typing import Any

from custom.tools.call_objects import OPENAI_KEYS, calls_in, make_call, may_be_openai
from custom.tools.call_objects import ActionParser as ActionParser
from custom.tools.calls import ToolCall as ToolCall
from custom.tools.families import FAMILIES
from custom.tools.function_calls import function_calls
from custom.tools.json_values import (
    BrokenValue,
    JSONReader,
    outermost_objects,
    skip,
    tagged_values,
)
from data.names import registered

TAG = "<tool_call>"

_CALL_KEY = re.compile(r'"(?:name|tool|tool_name|function|function_call|tool_calls?|action)"\s*:')
_REACT_LABEL = re.compile(
    r"(?m)^[ \t*]*(Thought|Action Input|Action|Input|Observation|Final Answer)[ \t*\d]*:[ \t*]*"
    # Or an action and its input on a line that begins otherwise.
    r"|(?<=[ \t])Action:[ \t]*(?P<on_one_line>[\w.-]+)[ \t]+(?:Action )?Input:[ \t]*"
)
# Brackets within the brackets are closed, too.
_REACT_BRACKETS = re.compile(r"([\w.-]+) ?\[((?:[^][]|\[[^][]*+\])*+)(\]?)")
_FENCED = re.compile(r"```\w*\n(.*?)\n?```", re.DOTALL)
_SPACE_AND_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_IDENTIFIER = re.compile(r"[\w.-]+")


class JSONActionParser(ActionParser):
    """Reads JSON objects anywhere in the text: `{"name": "add", "arguments": {"a": 1}}`.

    They are found in lists and code fences, too. "tool" and "action" may stand for "name",
    "parameters", "args", "input" and "action_input" for "arguments". Without arguments only
    `{"tool": …}` is a call. OpenAI's forms are understood too. All other objects are no calls.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls among the outermost JSON objects."""
        calls = []
        for value in outermost_objects(text, _CALL_KEY):
            calls += calls_in(value)
        return calls


class FunctionCallingParser(ActionParser):
    """Reads the calls that Qwen and Hermes models write in tags, or OpenAI's `tool_calls`.

    In tags: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the closing tag may be missing,
    and with a tag in the text nothing outside of tags is a call.
    OpenAI's: `{"tool_calls": [{"function": {"name": …, "arguments": "{…}"}}]}`, the single entry or
    `function_call`.
    A text with neither may have a bare `{"name": …, "arguments": {…}}`, as JSONActionParser reads
    it, or else `name(a=1, b="x")` on lines of their own. Only tools that there are are called so.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in tags, else those in OpenAI's form, else bare ones."""
        calls = []
        if TAG in text:
            for value in tagged_values(text, TAG):
                calls += calls_in(value, certain=True)
            return calls
        values = list(outermost_objects(text, _CALL_KEY))
        if any(f'"{key}"' in text for key in OPENAI_KEYS):
            for value in values:
                if may_be_openai(value):
                    calls += calls_in(value)
        if not calls:
            for value in values:
                if not isinstance(value, BrokenValue):
                    calls += [replace(call, may_be_text=True) for call in calls_in(value)]
        return calls or function_calls(text)


class ReActActionParser(ActionParser):
    """Reads `Action: add` and, on the next line, `Action Input: {"a": 1}`, or `Input: {"a": 1}`.

    Reads `Action: search[some text]` and `Thought: so Action: add Action Input: {"a": 1}`, too. An
    input that is no JSON object is passed on as text, without a code fence around it. Without an
    input the action must be a single word.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls of all actions."""
        if "Action" not in text:
            return []
        reader = JSONReader(text)
        labels = _react_labels(text)
        ends = [label.start() for label in labels[1:]]
        ends.append(len(text))
        calls = []
        # The end of the last input that was read, and the action whose input may follow.
        position = 0
        action = ""
        # Without labels there is one end.
        for label, end in zip(labels, ends, strict=False):
            # A label inside of a JSON input is none.
            if label.start() < position:
                continue
            kind = label.group(1)
            if label["on_one_line"]:
                calls += _react_alone(action)
                action = label["on_one_line"]
                kind = "Action Input"
            if action and kind in ("Action Input", "Input"):
                arguments, position = _react_input(reader, label.end(), end)
                calls.append(make_call(action, arguments))
                action = ""
                continue
            calls += _react_alone(action)
            action = ""
            if kind == "Action":
                action = text[label.end() : end].strip().strip("*`").strip()
        calls += _react_alone(action)
        return calls


PARSERS: dict[str, Any] = {
    "json": JSONActionParser,
    "react": ReActActionParser,
    "function": FunctionCallingParser,
}


def parser_names() -> list[str]:
    """Lists the names of the parsers that there are, those of families included."""
    return sorted([*PARSERS, *FAMILIES])


def get_parser(name: str) -> ActionParser:
    """Makes the parser of a name, a family's included; ValueError names the nearest."""
    return registered(PARSERS | FAMILIES, "agent.parser", name)()


# --- ReAct ---


def _react_labels(text: str) -> list[re.Match[str]]:
    """Returns the labels in a text; `Input:` is one behind an action alone, else prose."""
    labels: list[re.Match[str]] = []
    for label in _REACT_LABEL.finditer(text):
        follows_action = bool(labels) and labels[-1].group(1) == "Action"
        if label.group(1) != "Input" or follows_action:
            labels.append(label)
    return labels


def _react_input(reader: JSONReader, start: int, end: int) -> tuple[Any, int]:
    """Returns the input that begins at `start`, and its end.

    The end is a JSON value's, else that of the text up to the next label, `end`.
    """
    begin = skip(reader.text, start, _SPACE_AND_FENCE)
    if reader.text.startswith("{", begin) and begin < end:
        if reader.gave_up:
            return BrokenValue("too many broken values"), end
        return reader.read(begin)
    content = reader.text[start:end].strip()
    fenced = _FENCED.fullmatch(content)
    if fenced:
        content = fenced.group(1)
    return content, end


def _react_alone(action: str) -> list[ToolCall]:
    """Returns the call of an action without input; none where it is not a single word."""
    with_brackets = _REACT_BRACKETS.match(action)
    if with_brackets:
        name, text, closing = with_brackets.groups()
        if not closing:
            return [make_call(name, BrokenValue("the bracket is not closed"))]
        return [make_call(name, text)]
    if _IDENTIFIER.fullmatch(action):
        return [ToolCall(action)]
    return []
