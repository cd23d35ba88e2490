"""Families that write a call's arguments as JSON, each between its own markers.

    hermes          <tool_call>{"name": …, "arguments": {…}}</tool_call>
    llama_function  <function=NAME>{…}</function>
    llama3_json     {"name": …, "parameters": {…}}
    json_fence      ```json ↵ {"name": …, "arguments": {…}} ↵ ```
    mistral         [TOOL_CALLS][{"name": …, "arguments": {…}}]
    mistral (v11)   [TOOL_CALLS]NAME[ARGS]{…}
    kimi            <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}
                    <|tool_call_end|>
    deepseek        <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>

Invariant: a call is finished where its closing marker stands behind its arguments; in a form that
has none, where the JSON is whole and no limit cut the turn behind it.
"""

import re
from dataclasses import replace
from typing import Any, ClassVar

from custom.tools.call_objects import calls_in
from custom.tools.calls import ToolCall
from custom.tools.families.family import FamilyParser, TemplateFacts
from custom.tools.families.xml_forms import DSML, XMLForm
from custom.tools.json_values import BrokenValue, JSONReader, skip

# Behind an opening brace: a key that calls have.
_CALL_KEY = re.compile(r'\{\s*"(?:name|tool|tool_name|function|type|arguments|parameters)"\s*:')
_SEPARATORS = re.compile(r"[\s;,]*")


class HermesParser(FamilyParser):
    """Reads the calls of Qwen 2.5 and 3, Hermes, SmolLM3, Hunyuan and others in their tags."""

    name = "hermes"
    form = '<tool_call>{"name": "NAME", "arguments": {…}}</tool_call>'
    openers = ("<tool_call>",)
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    closes = "</tool_call>"

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        reader = JSONReader(text)
        value, end = reader.read(skip(text, opening.end()))
        closed = text.find(self.closes, end)
        if closed < 0:
            return [self.unfinished("", self.closes)], len(text)
        after = closed + len(self.closes)
        if isinstance(value, BrokenValue):
            return [self.fault("", f"the call is not valid JSON: {value.problem}")], after
        if text[end:closed].strip():
            return [self.fault("", f"there is text between the call and {self.closes}")], after
        return self.calls_of(value), after

    def calls_of(self, value: Any) -> list[ToolCall]:
        """Returns the calls of a value that must hold one."""
        told = f". A call is written {self.form}"
        return [
            replace(call, error=call.error + told) if call.error_kind else call
            for call in calls_in(value, certain=True)
        ]


class LlamaFunctionParser(FamilyParser):
    """Reads `<function=NAME>{…}</function>`, which Llama 3 writes for custom functions."""

    name = "llama_function"
    form = '<function=NAME>{"ARGUMENT": …}</function>'
    openers = (r"<function=(?P<name>[^<>\s]*)>",)
    markers = ("<|python_tag|>",)

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        name = opening["name"]
        call, end = self.json_call(JSONReader(text), name, opening.end(), "</function>")
        return [call], end

    def _plain(self, said: str) -> str:
        return said.replace("<|python_tag|>", "").strip()


class Llama3JSONParser(FamilyParser):
    """Reads the JSON objects that Llama 3 writes for calls; several stand behind semicolons."""

    name = "llama3_json"
    form = '{"name": "NAME", "parameters": {…}}'
    openers = (r'(?m:^[ \t]*)(?:<\|python_tag\|>\s*)?(?=\{\s*")', r"<\|python_tag\|>")
    markers = ("<|python_tag|>",)

    def parse_cut(self, text: str) -> list[ToolCall]:
        """Returns the calls of a turn that a limit cut; what is whole JSON may not be all."""
        return self.parse_unclosed(text)

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        calls: list[ToolCall] = []
        reader = JSONReader(text)
        place = opening.end()
        while text.startswith("{", place):
            may_be = _CALL_KEY.match(text, place) is not None
            value, end = reader.read(place)
            if isinstance(value, BrokenValue):
                if not may_be:
                    return calls, max(end, place + 1)
                told = "the JSON object does not end" if end >= len(text) else value.problem
                return [*calls, self.fault("", f"the call cannot be read: {told}")], len(text)
            found = calls_in(value)
            if not found:
                return calls, end
            calls += found
            place = skip(text, end, _SEPARATORS)
        return calls, place

    def _plain(self, said: str) -> str:
        return said.replace("<|python_tag|>", "").strip()


class JSONFenceParser(FamilyParser):
    """Reads calls in fences: ```json, ```tool_call or ```, and an object in it."""

    name = "json_fence"
    form = '```json\\n{"name": "NAME", "arguments": {…}}\\n```'
    openers = (r"```(?:json|tool_call|tool_code|tool)?[ \t]*\n\s*(?=[\[{])",)

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        value, end = JSONReader(text).read(opening.end())
        closed = text.find("```", end)
        after = closed + 3 if closed >= 0 else len(text)
        if isinstance(value, BrokenValue):
            if not _CALL_KEY.search(text, opening.end(), after):
                return [], after
            if closed < 0:
                return [self.unfinished("", "```")], after
            return [self.fault("", f"the call is not valid JSON: {value.problem}")], after
        calls = calls_in(value)
        if not calls:
            return [], after
        if closed < 0:
            return [self.unfinished(calls[0].name, "```")], after
        if text[end:closed].strip():
            return [self.fault(calls[0].name, "there is text between the call and ```")], after
        return calls, after


class MistralParser(HermesParser):
    """Reads Mistral's calls: a list behind [TOOL_CALLS], or since v11 a name and [ARGS]."""

    name = "mistral"
    form = '[TOOL_CALLS][{"name": "NAME", "arguments": {…}}], or [TOOL_CALLS]NAME[ARGS]{…}'
    openers = (r"\[TOOL_CALLS\]",)
    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _named = re.compile(
        r"\s*(?P<name>[\w.\-/]+)\s*(?:\[CALL_ID\](?P<id>[\w-]*)\s*)?(?:\[ARGS\])?\s*(?=\{)"
    )

    def parse_cut(self, text: str) -> list[ToolCall]:
        """Returns the calls of a turn that a limit cut; what is whole JSON may not be all."""
        return self.parse_unclosed(text)

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        reader = JSONReader(text)
        start = skip(text, opening.end())
        if text.startswith("[", start) or text.startswith("{", start):
            value, end = reader.read(start)
            if isinstance(value, BrokenValue):
                return [self._broken("", value, end, text)], len(text)
            return self.calls_of(value), end
        named = self._named.match(text, start)
        if named is None:
            rest = text.find("[TOOL_CALLS]", start)
            end = rest if rest >= 0 else len(text)
            return [self.unfinished("", "NAME[ARGS]{…}")], end
        value, end = reader.read(named.end())
        if isinstance(value, BrokenValue):
            return [self._broken(named["name"], value, end, text)], len(text)
        call = self.called(named["name"], value)
        return [replace(call, call_id=named["id"] or "")], end

    def _broken(self, name: str, value: BrokenValue, end: int, text: str) -> ToolCall:
        if end >= len(text):
            return self.fault(name, "the call is not finished: its JSON does not end")
        return self.fault(name, f"the call is not valid JSON: {value.problem}")


class KimiParser(FamilyParser):
    """Reads the calls of Kimi K2, whose ids begin with the tool's name."""

    name = "kimi"
    form = (
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|> "
        "within <|tool_calls_section_begin|> and <|tool_calls_section_end|>"
    )
    openers = (r"<\|tool_call_begin\|>",)
    markers = (
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    )
    _head = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"
    )

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        closes = "<|tool_call_end|>"
        head = self._head.match(text, opening.end())
        if head is None:
            end = text.find(closes, opening.end())
            if end < 0:
                return [self.unfinished("", closes)], len(text)
            return [self.fault("", "the call has no name and arguments")], end + len(closes)
        call, end = self.json_call(JSONReader(text), head["name"], head.end(), closes)
        return [replace(call, call_id=head["id"])], end

    def call_id(self, call: ToolCall, number: int) -> str:
        """Returns the id that the policy wrote, or one of its form."""
        return call.call_id or f"functions.{call.name}:{number}"

    def _plain(self, said: str) -> str:
        for marker in self.markers[:2]:
            said = said.replace(marker, "")
        return said.strip()


class DeepSeekParser(FamilyParser):
    """Reads the calls of DeepSeek R1 and V3 (in a fence), V3.1 (bare), and V3.2 and V4 (DSML)."""

    name = "deepseek"
    form = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{…}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>, or as the system message says"
    )
    openers = ("<｜tool▁call▁begin｜>", DSML.opens)
    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "｜DSML｜",
    )
    _head = re.compile(
        r"(?P<first>[^<\n]*)<｜tool▁sep｜>(?:(?P<second>[^\s{<][^\n<{]*)\n\s*```(?:json)?\s*)?"
    )
    _around = re.compile(
        r"<｜tool▁calls▁(?:begin|end)｜>|</?｜DSML｜(?:function_calls|tool_calls)>"
    )

    def __init__(self, facts: TemplateFacts | None = None) -> None:
        super().__init__(facts)
        self._dsml: XMLForm = DSML

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        if opening.group().startswith("<｜DSML｜"):
            call, end = self._dsml.read(self, text, opening)
            return [call], end
        closes = "<｜tool▁call▁end｜>"
        head = self._head.match(text, opening.end())
        closed = text.find(closes, opening.end())
        if closed < 0:
            return [self.unfinished("", closes)], len(text)
        after = closed + len(closes)
        if head is None or head.end() > closed:
            return [self.fault("", "the call has no name and arguments")], after
        in_fence = head["second"] is not None
        name = head["second"] if in_fence else head["first"]
        call, end = self.json_call(
            JSONReader(text), name, head.end(), "```" if in_fence else closes
        )
        if in_fence and not call.error_kind and text[end:closed].strip():
            call = self.fault(name, f"there is text between the arguments and {closes}")
        return [call], max(end, after)

    def _plain(self, said: str) -> str:
        return self._around.sub("", said).strip()
