"""Harmony, the form of gpt-oss: a turn is several messages, each with a channel.

    <|channel|>analysis<|message|>hm<|end|>                                      thinking
    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json
        <|message|>{"query": "x"}<|call|>                                        a call
    <|start|>assistant<|channel|>final<|message|>It is five.<|return|>           text

The generation prompt ends behind `<|start|>assistant`, so that a turn begins inside of a header;
chat templates write the recipient there, before the channel. It is read here and not by OpenAI's
`openai-harmony`, which reads ids of its own vocabulary and downloads that.

Invariant: a call is a message with a recipient that is closed by <|call|>.
"""

import re
from typing import Any

from custom.tools.calls import ToolCall
from custom.tools.families.family import FamilyParser, ReadTurn, Tools
from custom.tools.json_values import BrokenValue, JSONReader, skip

START = "<|start|>"
MESSAGE = "<|message|>"
_ENDS = re.compile(r"<\|(?:end|call|return|start)\|>")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
FUNCTIONS = "functions."
# A header has so many characters at most beside its markers.
MAX_HEADER = 300


class HarmonyParser(FamilyParser):
    """Reads the channels of gpt-oss."""

    name = "harmony"
    form = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>"
    openers = ()
    thinking = ()
    markers = (
        START,
        MESSAGE,
        "<|channel|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    )
    needs_message = True

    def read(self, text: str) -> ReadTurn:
        """Reads a turn, which begins inside of a header."""
        thinking: list[str] = []
        said: list[str] = []
        calls: list[ToolCall] = []
        written = 0
        position = 0
        while position < len(text):
            begins = text.find(MESSAGE, position)
            stops = _ENDS.search(text, position)
            if begins < 0 or (stops is not None and stops.start() < begins):
                # No message: a text without a channel, or an end that was written twice.
                end = stops.start() if stops is not None else len(text)
                cut, call = self._headless(text[position:end], stops is None)
                said.append(cut)
                calls += call
                position = stops.end() if stops is not None else end
                continue
            header = text[position:begins]
            start = begins + len(MESSAGE)
            stops = _ENDS.search(text, start)
            end = stops.start() if stops is not None else len(text)
            closing = stops.group() if stops is not None else ""
            position = stops.end() if stops is not None else end
            body = text[start:end]
            recipient = _RECIPIENT.search(header)
            channel = _CHANNEL.search(header)
            if recipient is not None and recipient[1] not in ("assistant", "all"):
                calls.append(self._call(recipient[1], body, closing))
            elif channel is not None and channel[1] == "analysis":
                thinking.append(body)
                written = end
            else:
                said.append(body)
        return ReadTurn(
            thinking="\n".join(thinking),
            written_thinking=text[:written],
            text="\n".join(part.strip() for part in said if part.strip()),
            calls=tuple(calls),
        )

    def _calls_at(self, text: str, opening: re.Match[str]) -> tuple[list[ToolCall], int]:
        raise AssertionError("a turn of harmony has no openers")

    def _headless(self, text: str, is_cut: bool) -> tuple[str, list[ToolCall]]:
        """Returns the text of what has no <|message|>, and the call that is cut in its header."""
        recipient = _RECIPIENT.search(text[:MAX_HEADER])
        if is_cut and recipient is not None and "<|channel|>" in text:
            name = recipient[1].removeprefix(FUNCTIONS)
            return "", [self.unfinished(name, MESSAGE)]
        if text.strip() in ("", "assistant"):
            return "", []
        if is_cut and "<|channel|>" in text:
            return "", []
        return text.removeprefix("assistant"), []

    def _call(self, recipient: str, body: str, closing: str) -> ToolCall:
        name = recipient.removeprefix(FUNCTIONS)
        if closing != "<|call|>":
            return self.unfinished(name, "<|call|>")
        if recipient == name and not body.lstrip().startswith("{"):
            # What OpenAI's own tools are sent, such as Python's code.
            return self.called(name, body)
        value, end = JSONReader(body).read(skip(body, 0))
        if isinstance(value, BrokenValue):
            return self.fault(name, f"the arguments are not valid JSON: {value.problem}")
        if body[end:].strip():
            return self.fault(name, "there is text behind the arguments")
        return self.called(name, value)

    def as_message(self, text: str, tools: Tools = None) -> dict[str, Any]:
        """Returns a turn as a message in its parts; beside a call stands thinking or text."""
        message = super().as_message(text, tools)
        assert message is not None
        if message.get("tool_calls") and message.get("thinking"):
            message["content"] = ""
        return message
