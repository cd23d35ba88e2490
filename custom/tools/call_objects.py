"""What every parser of tool calls is made of: its interface, and calls as decoded JSON values."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from custom.tools.calls import ToolCall
from custom.tools.json_values import BrokenValue, JSONReader, skip

ARGUMENT_KEYS = ("arguments", "parameters", "args", "action_input", "tool_input", "input")
# Any text under one of these is a call, readable or not.
CERTAIN_WRAPPERS = ("tool_calls", "tool_call", "function_call")
OPENAI_KEYS = ("tool_calls", "function_call", "function")
WRAPPER_KEYS = (*CERTAIN_WRAPPERS, "function", "action", "tool")
# What may stand behind a cut: letters go on with a word, and no form begins or ends with these.
GOES_ON = "0a"
CUT = "a limit cut the turn before this call was finished: it was not executed"
# A call is looked for so many objects and lists deep.
MAX_WRAPPERS = 5
# `{"name": "Bob"}` and `{"action": "north"}` are data; with arguments beside the name they are
# calls.
NAMES_ALONE = ("tool", "tool_name")
NAMES_WITH_ARGUMENTS = ("name", "function", "action")


class ActionParser(ABC):
    """Finds the tool calls in a model's text; subclass it for another form."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in order of appearance; empty where there is none."""

    def parse_cut(self, text: str) -> list[ToolCall]:
        """Returns the calls of a turn that a limit cut; what is not finished has the kind `cut`.

        A call is finished where the text's end has no part in it: it is the same without the last
        character, and with further ones. So it holds for any form, one without a closing marker
        too; forms that have one override this.
        """
        calls = self.parse(text)
        if not calls:
            return calls
        shorter = self.parse(text.rstrip()[:-1])
        longer = self.parse(text + GOES_ON)
        finished = 0
        while _is_same(finished, calls, shorter) and _is_same(finished, calls, longer):
            finished += 1
        if finished == len(calls) and calls[-1].error_kind == "bad_json":
            # What cannot be read may lack its end.
            finished -= 1
        return [*calls[:finished], *[as_cut(call) for call in calls[finished:]]]


def _is_same(place: int, calls: Sequence[ToolCall], others: Sequence[ToolCall]) -> bool:
    """Checks whether two lists have the same call at a place."""
    return place < min(len(calls), len(others)) and calls[place] == others[place]


def as_cut(call: ToolCall) -> ToolCall:
    """Returns a call as one that is not executed, since a limit cut it."""
    told = f"{CUT} ({call.error})" if call.error else CUT
    return replace(call, error_kind="cut", error=told)


def calls_in(value: Any, certain: bool = False, depth: int = 0) -> list[ToolCall]:
    """Returns the calls that a decoded value stands for.

    Args:
        value: what JSON may hold, or a BrokenValue.
        certain: a call must stand here; anything else is a bad call, not data.
        depth: of wrappers around the value.
    """
    if isinstance(value, BrokenValue):
        return [bad_json("", f"the call is not valid JSON: {value.problem}")]
    if depth < MAX_WRAPPERS:
        if isinstance(value, list):
            calls = []
            for item in value:
                calls += calls_in(item, certain, depth + 1)
            return calls
        if isinstance(value, dict):
            key = _wrapper_key(value)
            if key:
                return calls_in(value[key], certain or key in CERTAIN_WRAPPERS, depth + 1)
            name, arguments = _name_and_arguments(value, certain)
            if name:
                return [make_call(name, arguments)]
    if not certain:
        return []
    return [bad_json("", 'a call is an object {"name": …, "arguments": {…}}')]


def _wrapper_key(value: dict[str, Any]) -> str:
    """Returns the key under which an object holds a call as another object; empty: none."""
    for key in WRAPPER_KEYS:
        inner = value.get(key)
        if isinstance(inner, dict) or (key == "tool_calls" and isinstance(inner, list)):
            return key
    return ""


def _name_and_arguments(value: dict[str, Any], certain: bool) -> tuple[str, Any]:
    """Returns a call's name, empty where the object is none, and its arguments."""
    arguments_key = next((key for key in ARGUMENT_KEYS if key in value), None)
    arguments = {}
    if arguments_key:
        arguments = value[arguments_key]
    name_keys: tuple[str, ...] = NAMES_ALONE
    if certain or arguments_key:
        name_keys += NAMES_WITH_ARGUMENTS
    name = next((value[key] for key in name_keys if isinstance(value.get(key), str)), "")
    return name.strip(), arguments


def make_call(name: str, arguments: Any) -> ToolCall:
    """Makes a call of arguments: an object, a JSON text of one, or text for the only parameter."""
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        arguments = _decode_whole(arguments)
    if isinstance(arguments, BrokenValue):
        return bad_json(name, f"the arguments are not valid JSON: {arguments.problem}")
    if arguments is None:
        return ToolCall(name)
    if not isinstance(arguments, dict | str):
        return ToolCall(
            name, error_kind="bad_arguments", error="the arguments must be a JSON object"
        )
    return ToolCall(name, arguments)


def _decode_whole(text: str) -> Any:
    """Returns the JSON value that a text consists of, else a BrokenValue."""
    value, end = JSONReader(text).read(skip(text, 0))
    if not isinstance(value, BrokenValue) and text[end:].strip():
        return BrokenValue("there is text behind the object")
    return value


def bad_json(name: str, error: str) -> ToolCall:
    return ToolCall(name, error_kind="bad_json", error=error)


def may_be_openai(value: Any) -> bool:
    """Checks whether an object has a key that OpenAI's calls have; a broken one may be a call."""
    if isinstance(value, BrokenValue):
        return True
    return any(isinstance(value.get(key), dict | list) for key in OPENAI_KEYS)
