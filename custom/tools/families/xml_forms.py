"""Families that write each argument between tags of its own, without a type.

    qwen3_xml  <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> …
    glm        <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> </tool_call>
    minimax    <invoke name="NAME"> <parameter name="KEY">VALUE</parameter> </invoke>
    deepseek   <｜DSML｜invoke name="NAME"> <｜DSML｜parameter name="KEY" string="true">VALUE …

Invariants: a value is what stands between its tags, but for the one newline that a form puts at
each end; it ends where a closing tag is followed by what may follow an argument, so that a value
may spell the closing tag itself.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from custom.tools.calls import ToolCall, WrittenValue
from custom.tools.families.family import FamilyParser
from custom.tools.json_values import skip


@dataclass(frozen=True)
class XMLForm:
    """Describes a call whose arguments stand between tags.

    Attributes:
        opens: the pattern of a call's beginning, with the name as `name`.
        argument: that of an argument's beginning, with `key`.
        value_closes, closes: what ends a value, and a call.
        strips_newline: the form puts a newline before and behind each value.
    """

    opens: str
    argument: re.Pattern[str]
    value_closes: str
    closes: str
    strips_newline: bool = False

    def read(self, parser: FamilyParser, text: str, opening: re.Match[str]) -> tuple[ToolCall, int]:
        """Reads the call that begins here, and returns where it ends."""
        name = opening["name"].strip()
        arguments: dict[str, Any] = {}
        position = skip(text, opening.end())
        while not text.startswith(self.closes, position):
            begun = self.argument.match(text, position)
            if begun is None:
                return self._broken(parser, name, text, position)
            value, position = self._value(text, begun.end())
            if value is None:
                return parser.unfinished(name, self.value_closes), len(text)
            arguments[begun["key"].strip()] = self._read_value(value, begun)
            position = skip(text, position)
        return parser.called(name, arguments), position + len(self.closes)

    def _broken(
        self, parser: FamilyParser, name: str, text: str, position: int
    ) -> tuple[ToolCall, int]:
        """Makes the call in which something else stands than an argument."""
        closed = text.find(self.closes, position)
        if closed < 0:
            return parser.unfinished(name, self.closes), len(text)
        found = text[position : position + 40]
        return parser.fault(name, f"no argument begins at {found!r}"), closed + len(self.closes)

    def _value(self, text: str, start: int) -> tuple[str | None, int]:
        """Returns a value and where its closing tag ends; None where it is not closed."""
        place = text.find(self.value_closes, start)
        first = place
        while place >= 0:
            after = place + len(self.value_closes)
            follows = skip(text, after)
            if text.startswith(self.closes, follows) or self.argument.match(text, follows):
                return text[start:place], after
            place = text.find(self.value_closes, after)
        if first < 0 or skip(text, first + len(self.value_closes)) >= len(text):
            # Cut, or cut just behind it.
            return None, len(text)
        return text[start:first], first + len(self.value_closes)

    def _read_value(self, value: str, begun: re.Match[str]) -> Any:
        """Returns a value: as it is written, or as its tag says that it is."""
        is_text = begun.groupdict().get("is_text")
        if is_text == "false":
            try:
                return json.loads(value)
            except (ValueError, RecursionError):
                return WrittenValue(value)
        if is_text == "true":
            return value
        if self.strips_newline:
            value = value.removeprefix("\n").removesuffix("\n")
        return WrittenValue(value)


QWEN = XMLForm(
    opens=r"(?P<outer><(?:seed:)?tool_call>\s*)?<function=(?P<name>[^<>\n]*)>",
    argument=re.compile(r"<parameter=(?P<key>[^<>\n]*)>"),
    value_closes="</parameter>",
    closes="</function>",
    strips_newline=True,
)
MINIMAX = XMLForm(
    opens=r"""<invoke name=(?P<quote>["']?)(?P<name>[^<>"'\n]*)(?P=quote)\s*>""",
    argument=re.compile(r"""<parameter name=(?P<quote>["']?)(?P<key>[^<>"'\n]*)(?P=quote)\s*>"""),
    value_closes="</parameter>",
    closes="</invoke>",
)
DSML = XMLForm(
    opens=r'<｜DSML｜invoke name="(?P<name>[^<>"\n]*)"\s*>',
    argument=re.compile(
        r'<｜DSML｜parameter name="(?P<key>[^<>"\n]*)"(?:\s+string="(?P<is_text>true|false)")?\s*>'
    ),
    value_closes="</｜DSML｜parameter>",
    closes="</｜DSML｜invoke>",
)


class QwenXMLParser(FamilyParser):
    """Reads the calls of Qwen3-Coder, Qwen3.5 and Nemotron 3, and of Seed-OSS in its own tags."""

    name = "qwen3_xml"
    form = (
        "<tool_call>\\n<function=NAME>\\n<parameter=ARGUMENT>\\nVALUE\\n</parameter>\\n"
        "</function>\\n</tool_call>"
    )
    openers = (QWEN.opens, "<(?:seed:)?tool_call>")
    thinking = (*FamilyParser.thinking, ("<seed:think>", "</seed:think>"))
    markers = ("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>")

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        closes = "</tool_call>"
        if opening.group().startswith("<seed:"):
            closes = "</seed:tool_call>"
        if opening["name"] is None:
            closed = text.find(closes, opening.end())
            if closed < 0:
                return [self.unfinished("", closes)], len(text)
            return [self.fault("", "no <function=NAME> follows")], closed + len(closes)
        call, end = QWEN.read(self, text, opening)
        follows = skip(text, end)
        if text.startswith(closes, follows):
            return [call], follows + len(closes)
        another = text.startswith("<function=", follows)
        if opening["outer"] is None or call.error_kind or another:
            return [call], end
        if closes.startswith(text[follows:].rstrip()):
            return [self.unfinished(call.name, closes)], len(text)
        return [self.fault(call.name, f"{closes} is missing")], end

    def _plain(self, said: str) -> str:
        return said.replace("</tool_call>", "").replace("</seed:tool_call>", "").strip()


class MiniMaxParser(FamilyParser):
    """Reads the calls of MiniMax M2."""

    name = "minimax"
    form = (
        '<minimax:tool_call>\\n<invoke name="NAME">\\n<parameter name="ARGUMENT">VALUE</parameter>'
        "\\n</invoke>\\n</minimax:tool_call>"
    )
    openers = (MINIMAX.opens,)
    markers = ("<minimax:tool_call>", "</minimax:tool_call>")

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        call, end = MINIMAX.read(self, text, opening)
        return [call], end

    def _plain(self, said: str) -> str:
        for marker in self.markers:
            said = said.replace(marker, "")
        return said.strip()


class GLMParser(FamilyParser):
    """Reads the calls of GLM-4.5 and later."""

    name = "glm"
    form = (
        "<tool_call>NAME\\n<arg_key>ARGUMENT</arg_key>\\n<arg_value>VALUE</arg_value>\\n"
        "</tool_call>"
    )
    openers = (r"<tool_call>(?P<name>[^<]*)",)
    markers = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    _form = XMLForm(
        opens=openers[0],
        argument=re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
        value_closes="</arg_value>",
        closes="</tool_call>",
    )

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        call, end = self._form.read(self, text, opening)
        if not call.error_kind and re.search(r"\s", call.name):
            call = self.fault("", "the name of the tool stands alone behind <tool_call>")
        return [call], end
