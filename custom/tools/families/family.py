"""What all families' parsers share: a turn is read into thinking, text and calls.

    <think>…</think>  so I look.  <tool_call>…</tool_call>
    thinking          text        calls

Invariants: a call that is not finished, whatever it lacks, is returned with an `error_kind` and
never executed; what is spelt like a call inside of thinking is thinking; `read` never raises, and
takes time linear in the text.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from custom.tools.argument_types import with_types
from custom.tools.call_objects import ActionParser, as_cut, bad_json, make_call
from custom.tools.calls import ToolCall
from custom.tools.json_values import BrokenValue, JSONReader, skip

Tools = Sequence[dict[str, Any]] | None
# How a sentence begins that tells of a call without its end.
NOT_FINISHED = "the call is not finished"
# By which the templates of several families take a turn's thinking.
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
# How many calls of a turn that cannot be read are told of: behind them the text is garbage.
MAX_FAULTS = 32


@dataclass(frozen=True, kw_only=True)
class ReadTurn:
    """Holds what a turn says.

    Attributes:
        thinking: without its markers.
        written_thinking: what stands before the rest, as it was written.
        text: what is neither thinking nor a call.
    """

    thinking: str = ""
    written_thinking: str = ""
    text: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def finished(self) -> list[ToolCall]:
        """Lists the calls that can be executed."""
        return [call for call in self.calls if not call.error_kind]


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """Says of a chat template what a parser has to know.

    Attributes:
        opens_thinking: the generation prompt ends inside of thinking.
        arguments_as_text: it takes a call's arguments as JSON text, not as an object.
        results_as_tool: it takes a call's result as a message of the role `tool`.
        renders_calls: it renders the calls of an assistant's message.
    """

    opens_thinking: bool = False
    arguments_as_text: bool = False
    results_as_tool: bool = False
    renders_calls: bool = False


class FamilyParser(ActionParser):
    """Reads the turns of a family of models; subclass it for another form.

    Attributes:
        name: by which `agent.parser` calls it.
        form: how a call is written, for those who wrote one wrongly.
        openers: patterns of what begins a call.
        thinking: what opens and what closes thinking.
        markers: texts that may be special tokens, and that are read here.
        needs_message: a chat template of this form takes a turn in its parts alone.
    """

    name: ClassVar[str]
    form: ClassVar[str]
    openers: ClassVar[tuple[str, ...]]
    thinking: ClassVar[tuple[tuple[str, str], ...]] = (
        ("<think>", "</think>"),
        ("[THINK]", "[/THINK]"),
    )
    markers: ClassVar[tuple[str, ...]] = ()
    needs_message: ClassVar[bool] = False

    def __init__(self, facts: TemplateFacts | None = None) -> None:
        self.facts = facts or TemplateFacts()

    @property
    def source(self) -> str:
        """Returns what `agent.parser` calls it."""
        return self.name

    def under(self, facts: TemplateFacts) -> "FamilyParser":
        """Returns the parser for a chat template."""
        return type(self)(facts)

    @cached_property
    def read_markers(self) -> frozenset[str]:
        """Returns the special tokens' texts that a turn is to be read with."""
        opened = [marker for pair in self.thinking for marker in pair]
        return frozenset([*opened, *self.markers])

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in order of appearance; empty where there is none."""
        return list(self.read(text).calls)

    def parse_cut(self, text: str) -> list[ToolCall]:
        """Returns the calls of a turn that a limit cut.

        A form that closes its calls knows by itself which is not finished; others override this by
        `parse_unclosed`.
        """
        return [
            as_cut(call) if call.error.startswith(NOT_FINISHED) else call
            for call in self.parse(text)
        ]

    def parse_unclosed(self, text: str) -> list[ToolCall]:
        """Does as `parse_cut`, for a form that has no marker behind a call."""
        return super().parse_cut(text)

    def read(self, text: str) -> ReadTurn:
        """Reads a turn."""
        thinking, start = self._leading_thinking(text)
        written = text[:start]
        calls: list[ToolCall] = []
        said: list[str] = []
        thoughts = [thinking] if thinking else []
        faults = 0
        position = start
        while faults < MAX_FAULTS and (found := self._opening.search(text, position)):
            said.append(text[position : found.start()])
            closes = self._closes.get(found.group())
            if closes is not None:
                end = text.find(closes, found.end())
                thoughts.append(text[found.end() : end if end >= 0 else len(text)].strip("\n"))
                position = end + len(closes) if end >= 0 else len(text)
                continue
            new_calls, position = self._calls_at(text, found)
            faults += any(call.error_kind for call in new_calls)
            calls += new_calls
            if not new_calls:
                said.append(text[found.start() : position])
        if faults < MAX_FAULTS:
            said.append(text[position:])
        return ReadTurn(
            thinking="\n".join(thoughts),
            written_thinking=written,
            text=self._plain("".join(said)),
            calls=tuple(calls),
        )

    @abstractmethod
    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        """Returns the calls that an opening begins, and where they end; none: it was text."""

    def _plain(self, said: str) -> str:
        """Returns a text without the markers that stand around calls."""
        return said.strip()

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        """Compiles what finds the next call, or the next thinking."""
        thinking = [re.escape(opens) for opens, _ in self.thinking]
        return re.compile("|".join([*self.openers, *thinking]))

    @cached_property
    def _closes(self) -> dict[str, str]:
        return dict(self.thinking)

    def _leading_thinking(self, text: str) -> tuple[str, int]:
        """Returns the thinking that a turn begins with, and where the rest begins.

        Its opening may stand in the prompt; then all up to the closing is thinking.
        """
        begin = skip(text, 0)
        for opens, closes in self.thinking:
            is_open = text.startswith(opens, begin)
            start = begin + len(opens) if is_open else 0
            end = text.find(closes, start)
            if end >= 0 and not is_open and opens in text[:end]:
                # The one that is closed was opened later.
                continue
            if end >= 0:
                return text[start:end].strip("\n"), end + len(closes)
            if is_open:
                return text[start:].strip("\n"), len(text)
        if self.facts.opens_thinking:
            return text.strip("\n"), len(text)
        return "", 0

    # Faults

    def fault(self, name: str, problem: str) -> ToolCall:
        """Makes the call that tells the policy what is wrong, in its own form."""
        return bad_json(name, f"{problem}. A call is written {self.form}")

    def unfinished(self, name: str, missing: str) -> ToolCall:
        """Makes the call that was not finished."""
        return self.fault(name, f"{NOT_FINISHED}: {missing} is missing")

    def called(self, name: str, arguments: Any) -> ToolCall:
        """Makes a call of a name and what stands for its arguments."""
        if not name.strip():
            return self.fault("", "the call has no name")
        call = make_call(name.strip(), arguments)
        if call.error_kind:
            return replace(call, error=f"{call.error}. A call is written {self.form}")
        return call

    def json_call(
        self, reader: JSONReader, name: str, start: int, closes: str
    ) -> tuple[ToolCall, int]:
        """Reads a call's arguments, one JSON value that is followed by `closes`, and their end."""
        value, end = reader.read(skip(reader.text, start))
        closed = reader.text.find(closes, end)
        if closed < 0:
            return self.unfinished(name, closes), len(reader.text)
        after = closed + len(closes)
        if isinstance(value, BrokenValue):
            return self.fault(name, f"the arguments are not valid JSON: {value.problem}"), after
        if reader.text[end:closed].strip():
            return self.fault(name, f"there is text between the arguments and {closes}"), after
        return self.called(name, value), after

    # A turn as a message

    def call_id(self, call: ToolCall, number: int) -> str:
        """Returns the id of a turn's call, by which its result names it.

        It has nine letters and digits, as Mistral's templates require.
        """
        return call.call_id or f"call{number:05d}"

    @property
    def empty_arguments(self) -> Any:
        """Returns no arguments, as the template takes them."""
        return "{}" if self.facts.arguments_as_text else {}

    def as_message(self, text: str, tools: Tools = None) -> dict[str, Any] | None:
        """Returns a turn as a message in its parts, as chat templates take it.

        None where the template reads the turn's text as it stands.
        """
        turn = self.read(text)
        has_parts = bool(turn.thinking) or bool(turn.finished and self.facts.renders_calls)
        is_whole = len(turn.finished) == len(turn.calls)
        if not self.needs_message and not (has_parts and is_whole):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.thinking:
            message |= dict.fromkeys(THINKING_KEYS, turn.thinking)
        if turn.finished:
            message["tool_calls"] = [
                self._as_entry(call, number, tools) for number, call in enumerate(turn.finished)
            ]
        return message

    def _as_entry(self, call: ToolCall, number: int, tools: Tools) -> dict[str, Any]:
        """Returns a call as an entry of `tool_calls`."""
        arguments: Any = typed_arguments(call, tools)
        if self.facts.arguments_as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self.call_id(call, number), "type": "function", "function": function}

    def reads_alike(self, sampled: str, rendered: str) -> bool:
        """Checks whether a rendered turn says what was sampled, written otherwise at most.

        Calls that could not be read do not count, nor does white space.
        """
        one = self.read(sampled)
        other = self.read(rendered)
        texts = zip(
            (one.written_thinking, one.thinking, one.text),
            (other.written_thinking, other.thinking, other.text),
            strict=True,
        )
        same_texts = all(squashed(a) == squashed(b) for a, b in texts)
        return same_texts and looks_of(one.finished) == looks_of(other.finished)


def said_in(text: str, parser: object) -> str:
    """Returns what of a turn an environment reads: all, or with a family's parser no thinking."""
    if not isinstance(parser, FamilyParser):
        return text
    turn = parser.read(text)
    if parser.needs_message:
        return turn.text
    return text[len(turn.written_thinking) :].strip() if turn.written_thinking else text


def typed_arguments(call: ToolCall, tools: Tools) -> dict[str, Any]:
    """Returns a call's arguments by name, with the types of the tool's schema."""
    schema: dict[str, Any] = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if function.get("name") == call.name:
            schema = function.get("parameters") or {}
    if isinstance(call.arguments, dict):
        return with_types(call.arguments, schema)
    names = schema.get("required") or list(schema.get("properties") or ["input"])
    return {names[0]: call.arguments}


def looks_of(calls: list[ToolCall]) -> list[tuple[str, str]]:
    """Returns what calls say, whatever the order of their arguments."""
    return [
        (call.name, squashed(json.dumps(call.arguments, sort_keys=True, default=str)))
        for call in calls
    ]


def squashed(text: str) -> str:
    """Drops all white space."""
    return "".join(text.split())
