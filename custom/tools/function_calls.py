"""Reads calls that are written as in Python: `add(a=1, b="x")`, on a line of its own.

Invariant: nothing here raises, and the time is linear in the text. Arguments are values alone, as
JSON or Python writes them: `print(x)` and `f(1 + 2)` are no calls. Nothing is evaluated.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from custom.tools.calls import ToolCall
from custom.tools.json_values import BrokenValue, JSONReader, skip

# A call may stand in backquotes.
_CALL_START = re.compile(r"(?m)^[ \t`]*([A-Za-z_][\w.-]*)\(")
_CALL_END = re.compile(r"(?m)\s*+,?\s*+\)[ \t`;]*$")
_COMMA = re.compile(r"\s*,\s*")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(?!=)")
_SINGLE_QUOTED = re.compile(r"'((?:[^'\\]|\\.)*+)'", re.DOTALL)
_ESCAPED = re.compile(r"""\\([ntr'"\\])""")
_PYTHON_WORD = re.compile(r"(True|False|None)\b")
PYTHON_WORDS = {"True": True, "False": False, "None": None}
# The meaning of a backslash and one of these letters; quotes and backslashes mean themselves.
ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


@dataclass
class Arguments:
    """Holds a call's arguments in their order: those without a name, and those by name."""

    unnamed: list[Any] = field(default_factory=list)
    named: dict[str, Any] = field(default_factory=dict)


def function_calls(text: str) -> list[ToolCall]:
    """Returns the calls that stand on lines of their own; each `may_be_text`."""
    if "(" not in text:
        return []
    reader = JSONReader(text)
    calls = []
    position = 0
    while not reader.gave_up and (start := _CALL_START.search(text, position)):
        arguments, position = _read_arguments(reader, start.end())
        if arguments is not None:
            calls.append(_make_call(start.group(1), arguments))
    return calls


def _read_arguments(reader: JSONReader, position: int) -> tuple[Arguments | None, int]:
    """Returns the arguments that begin here, and where they end; None where these are none."""
    arguments = Arguments()
    position = skip(reader.text, position)
    end = _CALL_END.match(reader.text, position)
    while not end:
        keyword = _KEYWORD.match(reader.text, position)
        if keyword:
            position = keyword.end()
        value, position = _read_value(reader, position)
        if isinstance(value, BrokenValue):
            return None, position
        if keyword:
            arguments.named[keyword.group(1)] = value
        else:
            arguments.unnamed.append(value)
        end = _CALL_END.match(reader.text, position)
        comma = _COMMA.match(reader.text, position)
        if not end and not comma:
            return None, position
        if comma:
            position = comma.end()
    return arguments, end.end()


def _read_value(reader: JSONReader, position: int) -> tuple[Any, int]:
    """Returns the JSON value, 'text', True, False or None that begins here, and its end."""
    quoted = _SINGLE_QUOTED.match(reader.text, position)
    if quoted:
        return _ESCAPED.sub(_unescaped, quoted.group(1)), quoted.end()
    word = _PYTHON_WORD.match(reader.text, position)
    if word:
        return PYTHON_WORDS[word.group(1)], word.end()
    return reader.read(position)


def _unescaped(escaped: re.Match[str]) -> str:
    return ESCAPES.get(escaped.group(1), escaped.group(1))


def _make_call(name: str, arguments: Arguments) -> ToolCall:
    """Makes a call of named arguments, of one object with them, or of the only one as text."""
    unnamed = arguments.unnamed
    if not unnamed:
        return ToolCall(name, arguments.named, may_be_text=True)
    if len(unnamed) == 1 and not arguments.named and isinstance(unnamed[0], dict | str):
        return ToolCall(name, unnamed[0], may_be_text=True)
    return ToolCall(
        name,
        error_kind="bad_arguments",
        error=f"give the arguments by name, as in {name}(NAME=VALUE)",
        may_be_text=True,
    )
