"""Families that write a call as code.

    pythonic  [look(query="x")]
    gemma     <|tool_call>call:look{query:<|"|>x<|"|>}<tool_call|>

Invariant: the calls of a list are finished once its bracket is closed, all of them or none.
"""

import re
from typing import Any, ClassVar

from custom.tools.calls import ToolCall
from custom.tools.families.family import FamilyParser
from custom.tools.families.literals import LiteralReader, Unreadable
from custom.tools.json_values import skip

_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\(")


class PythonicParser(FamilyParser):
    """Reads the list of calls that Llama 3.2 and 4, LFM2 and OLMo 3 write as in Python."""

    name = "pythonic"
    form = '[NAME(ARGUMENT="VALUE")]'
    openers = (
        r"(?P<wraps><\|tool_call_start\|>|<\|python_start\|>|<\|python_tag\|>|<function_calls>)\s*",
        r"\[(?=\s*[A-Za-z_][\w.-]*\()",
    )
    markers = (
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        "<|python_start|>",
        "<|python_end|>",
        "<|python_tag|>",
        "<function_calls>",
        "</function_calls>",
    )
    # What may stand around a list: what opens it, and what then must close it.
    wrappers: ClassVar[dict[str, str]] = {
        "<|tool_call_start|>": "<|tool_call_end|>",
        "<|python_start|>": "<|python_end|>",
        "<function_calls>": "</function_calls>",
    }

    def parse_cut(self, text: str) -> list[ToolCall]:
        """Returns the calls of a turn that a limit cut; a list without markers may go on."""
        if text.rstrip().endswith(tuple(self.wrappers.values())):
            return super().parse_cut(text)
        return self.parse_unclosed(text)

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        wraps = (opening["wraps"] or "").strip()
        closes = self.wrappers.get(wraps, "")
        reader = LiteralReader(text, position=opening.end())
        bracket = not wraps or reader.takes("[")
        try:
            calls = self._list(reader, bracket, closes)
        except Unreadable as error:
            return self._unread(text, opening, error)
        if not wraps and not self._stands_alone(text, opening.start(), reader.position):
            return [], reader.position
        return calls, reader.position

    def _list(self, reader: LiteralReader, bracket: bool, closes: str) -> list[ToolCall]:
        """Reads the calls up to what closes their list."""
        calls: list[ToolCall] = []
        while not (bracket and reader.takes("]")):
            if not bracket and closes and reader.takes(closes):
                return calls
            name = _NAME.match(reader.text, reader.position)
            if name is None:
                if not bracket and not closes and calls:
                    return calls
                left = reader.text[reader.position :].strip()
                raise Unreadable(f"no call begins at {left[:20]!r}", is_cut=not left)
            reader.position = name.end()
            unnamed, named = reader.arguments()
            calls.append(self._call(name[1], unnamed, named))
            if not reader.takes(",") and bracket:
                reader.needs("]")
                break
        if closes:
            reader.needs(closes)
        return calls

    def _call(self, name: str, unnamed: list[Any], named: dict[str, Any]) -> ToolCall:
        if not unnamed:
            return self.called(name, named)
        if len(unnamed) == 1 and not named and isinstance(unnamed[0], dict | str):
            return self.called(name, unnamed[0])
        return self.fault(name, "the arguments have no names")

    def _unread(
        self, text: str, opening: re.Match[str], error: Unreadable
    ) -> tuple[list[ToolCall], int]:
        """Returns what a list that cannot be read is: a faulty call, or text such as `[f(x)]`."""
        if not opening["wraps"] and not self._stands_alone(text, opening.start(), len(text)):
            return [], opening.end()
        told = "the call is not finished: " if error.is_cut else "the call cannot be read: "
        return [self.fault("", f"{told}{error}")], len(text)

    def _stands_alone(self, text: str, start: int, end: int) -> bool:
        """Checks whether a list without markers has its lines for itself."""
        line = text.rfind("\n", 0, start) + 1
        closes = text.find("\n", end)
        behind = text[end : closes if closes >= 0 else len(text)]
        before = text[line:start]
        return not before.strip(" \t`") and not behind.strip(" \t`;")


class GemmaParser(FamilyParser):
    """Reads the calls of Gemma 4, whose texts stand between <|"|>."""

    name = "gemma"
    form = '<|tool_call>call:NAME{ARGUMENT:<|"|>VALUE<|"|>}<tool_call|>'
    openers = (r"<\|tool_call>",)
    thinking = (("<|channel>", "<channel|>"),)
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    needs_message = True
    _head = re.compile(r"\s*call:(?P<name>[^\s{}<>]+)\s*(?=\{)")

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        closes = "<tool_call|>"
        head = self._head.match(text, opening.end())
        if head is None:
            end = text.find(closes, opening.end())
            if end < 0:
                return [self.unfinished("", closes)], len(text)
            return [self.fault("", "no call:NAME{…} follows")], end + len(closes)
        quotes = {'<|"|>': '<|"|>'}
        reader = LiteralReader(text, quotes=quotes, bare_keys=True, position=head.end())
        name = head["name"]
        try:
            arguments = reader.value()
        except Unreadable as error:
            end = text.find(closes, reader.position)
            if end < 0:
                return [self.unfinished(name, closes)], len(text)
            return [self.fault(name, f"the arguments cannot be read: {error}")], end + len(closes)
        position = skip(text, reader.position)
        if text.startswith(closes, position):
            return [self.called(name, arguments)], position + len(closes)
        end = text.find(closes, position)
        if end < 0:
            return [self.unfinished(name, closes)], len(text)
        told = f"there is text between the arguments and {closes}"
        return [self.fault(name, told)], end + len(closes)

    def _leading_thinking(self, text: str) -> tuple[str, int]:
        thinking, start = super()._leading_thinking(text)
        return thinking.removeprefix("thought").strip("\n"), start
