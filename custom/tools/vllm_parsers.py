"""Reads calls by a parser of vLLM's, `vllm:NAME`, behind a guard against calls that are cut off.

vLLM's parsers serve a finished answer, and many return a call that lacks its last argument where a
text is cut. So the template's own rendering says what opens and what closes a call: what was opened
last and is not closed is not shown to vLLM at all, and arguments must be whole JSON objects.

Invariant: a call that is returned was closed by its marker, or is whole JSON; of a turn that a
limit cut, the former alone, or what stands before further text.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from custom.tools.calls import ToolCall, WrittenValue
from custom.tools.families.family import FamilyParser, ReadTurn, TemplateFacts

PREFIX = "vllm:"
# A marker looks like <…>, or […] in capitals.
_MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")


def markers_around(one: str, other: str) -> tuple[str, str]:
    """Returns the first marker that two renderings of calls begin with, and the last of their ends.

    Empty where they have none.
    """
    begin = 0
    while begin < min(len(one), len(other)) and one[begin] == other[begin]:
        begin += 1
    end = 0
    while end < min(len(one), len(other)) - begin and one[-1 - end] == other[-1 - end]:
        end += 1
    opening = _MARKER.search(one[:begin])
    closing = _MARKER.findall(one[len(one) - end :])
    return (opening.group() if opening else ""), (closing[-1] if closing else "")


class VLLMParser(FamilyParser):
    """Reads by a parser of the installed vLLM's.

    Args:
        source: vllm:NAME.
        tokenizer: the policy's, whose vocabulary vLLM's parsers look into.
        opens, closes: what stands at a call's beginning and end; "": nothing that can be told.
    """

    name: ClassVar[str] = "vllm"
    openers: ClassVar[tuple[str, ...]] = (r"(?!)",)

    def __init__(
        self,
        source: str,
        tokenizer: Any,
        *,
        opens: str = "",
        closes: str = "",
        facts: TemplateFacts | None = None,
    ) -> None:
        super().__init__(facts)
        self._source = source
        self.tokenizer = tokenizer
        self.opens = opens
        self.closes = closes
        # Messages to the policy show its own form.
        self.form = f"{opens} … {closes}, as the system message says"  # type: ignore[misc]
        self.markers = (*filter(None, (opens, closes)),)  # type: ignore[misc]

    @property
    def source(self) -> str:
        """Returns vllm:NAME."""
        return self._source

    def under(self, facts: TemplateFacts) -> "VLLMParser":
        """Returns the parser for a chat template."""
        return VLLMParser(
            self._source, self.tokenizer, opens=self.opens, closes=self.closes, facts=facts
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves the tokenizer out where it can be loaded again."""
        state = dict(self.__dict__)
        state.pop("parser_class", None)
        state.pop("read_markers", None)
        place = getattr(self.tokenizer, "name_or_path", "")
        if place and Path(place).is_dir():
            state["tokenizer"] = place
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.tokenizer, str):
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)

    @cached_property
    def parser_class(self) -> Any:
        """Loads the class of vLLM's.

        Raises:
            ValueError: vLLM is not installed, or has no such parser.
        """
        try:
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise ValueError(
                f"agent.parser={self.source} needs vLLM, which cannot be imported here: {error}"
            ) from error
        name = self.source.removeprefix(PREFIX)
        try:
            return ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ValueError(
                f"agent.parser={self.source}: the installed vLLM has no parser {name!r}; it has "
                f"{known}"
            ) from error

    def read(self, text: str) -> ReadTurn:
        """Reads a turn."""
        thinking, start = self._leading_thinking(text)
        rest = text[start:]
        last = rest.rfind(self.opens) if self.opens else -1
        cut: list[ToolCall] = []
        if last >= 0 and self.closes and self.closes not in rest[last:]:
            cut = [self.unfinished("", self.closes)]
            rest = rest[:last]
        calls, said = self._read_whole(rest.strip())
        if not calls and not cut and self.opens and self.opens in rest:
            calls = [self.fault("", "the call cannot be read")]
        return ReadTurn(
            thinking=thinking,
            written_thinking=text[:start],
            text=said.strip(),
            calls=(*calls, *cut),
        )

    def parse_cut(self, text: str) -> list[ToolCall]:
        """Returns the calls of a turn that a limit cut."""
        if self.closes:
            return super().parse_cut(text)
        return self.parse_unclosed(text)

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        raise AssertionError("vLLM reads a text as a whole")

    def _read_whole(self, text: str) -> tuple[list[ToolCall], str]:
        """Returns vLLM's calls, and what it calls content."""
        if not text.strip():
            return [], ""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        asked = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="policy")
        make_parser = self.parser_class
        # A parser of vLLM's may raise anything on what a policy writes.
        try:
            found = make_parser(self.tokenizer, asked.tools).extract_tool_calls(text, asked)
        except Exception as error:
            return [self.fault("", f"the call cannot be read: {type(error).__name__}")], ""
        if not found.tools_called:
            return [], text
        calls = [self._call(each.function) for each in found.tool_calls]
        return calls, found.content or ""

    def _call(self, function: Any) -> ToolCall:
        """Makes a call of vLLM's, whose arguments are JSON text."""
        try:
            arguments = json.loads(function.arguments)
        except (TypeError, ValueError, RecursionError) as error:
            return self.fault(str(function.name), f"the arguments are not valid JSON: {error}")
        if not isinstance(arguments, dict):
            return self.fault(str(function.name), "the arguments are no JSON object")
        # vLLM was told no schema, so that forms without types come as texts.
        written = {
            name: WrittenValue(value) if isinstance(value, str) else value
            for name, value in arguments.items()
        }
        return self.called(str(function.name), written)
