"""Shows the policy's answers to clients, and knows an answer again that they send back.

A client gets an answer in parts: text, thinking, tool calls. When it sends the conversation back,
the answer is to read as it was sampled. Invariant: a message counts as the policy's own only where
all of it comes back, its thinking included, from the same speaker and behind the very messages that
it was sampled for. One whose thinking a client drops reads as it was sent, as it will once the
policy is deployed, where nobody remembers it; `programs.dropped_thinking=recalled` adds it again.
What only looks like an answer is the client's own: an example, the words of another agent, a
history that was rewritten. So is what two answers at one place have in common.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from custom.tools.calls import ToolCall
from custom.tools.families import FamilyParser, said_in
from custom.tools.families.family import typed_arguments
from custom.tools.parsers import TAG, ActionParser
from custom.tools.turns import calls_of
from data.cut_text import CutText
from features.programs.exchange import Answer, AnsweredCompletion, AskedCompletion, Call, Json
from features.programs.protocols.protocol import THINKING_KEY, check_depth, tool_call
from workers.rollout.speaker import NOBODY, Speaker

# Thinking at the beginning of an answer; its opening may stand in the prompt.
THINKING = re.compile(r"^\s*(?:<think>)?(.*?)</think>", re.DOTALL)
# How often lists and objects of a call may hold each other, which then stand in a request.
MAX_CALL_DEPTH = 50
# Made once: `json.dumps` makes an encoder for every message of every request.
ENCODER = json.JSONEncoder(sort_keys=True, default=str)


class Recalled(NamedTuple):
    """Holds a conversation with its answers as they were sampled.

    `digest` stands for the conversation as the client sent it.
    """

    messages: list[Json]
    digest: str


@dataclass(eq=False)
class Recall:
    """Makes answers for clients, and knows them again.

    Attributes:
        adds_thinking: an answer is known again also where its thinking does not come back.
        by_place: texts as sampled, by who asked, what came before them and what the client saw of
            them; None: several look alike there.
        unread: how many answers had calls that could not be read.
    """

    parser: ActionParser
    adds_thinking: bool = False
    by_place: dict[tuple[Speaker, str, str], str | None] = field(default_factory=dict)
    unread: int = 0

    def recalled(
        self,
        messages: list[Json],
        speaker: Speaker = NOBODY,
        tools: list[Json] | None = None,
    ) -> Recalled:
        """Returns a speaker's messages with each answer of the policy's as it was sampled.

        A family's parser gives it in the parts that the chat template takes.
        """
        recalled = []
        before = ""
        for message in messages:
            as_sampled = self._as_templates_take(message)
            if message["role"] == "assistant":
                look = look_of(message["content"], calls_in(message), message.get(THINKING_KEY, ""))
                text = self.by_place.get((speaker, before, look))
                if text is not None:
                    as_sampled = self._as_sampled(text, tools)
            recalled.append(as_sampled)
            before = digest(before, without_thinking(message) if self.adds_thinking else message)
        return Recalled(recalled, before)

    def _as_sampled(self, text: str, tools: list[Json] | None) -> Json:
        """Returns an answer of the policy's as a message."""
        in_parts = None
        if isinstance(self.parser, FamilyParser):
            in_parts = self.parser.as_message(text, tools)
        return in_parts or {"role": "assistant", "content": text}

    def _as_templates_take(self, message: Json) -> Json:
        """Returns a client's message, its calls' arguments as the template takes them."""
        if not isinstance(self.parser, FamilyParser) or "tool_calls" not in message:
            return message
        if not self.parser.facts.arguments_as_text:
            return message
        entries = []
        for entry in message["tool_calls"]:
            function = dict(entry["function"])
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            entries.append({**entry, "function": function})
        return {**message, "tool_calls": entries}

    def shown(
        self, asked: AskedCompletion, answer_id: str, number: int, answer: Answer, before: str
    ) -> AnsweredCompletion:
        """Makes what the client sees of an answer, and remembers that.

        Args:
            before: the digest of the conversation, as `recalled` gave it.
        """
        text = answer.text
        if answer.stop is not None:
            text = text.partition(answer.stop)[0]
        if isinstance(self.parser, FamilyParser):
            return self._shown_by_family(asked, answer_id, number, answer, text, before)
        thinking = ""
        thought = THINKING.match(text)
        if thought is not None:
            thinking = thought[1].strip("\n")
            text = text[thought.end() :].lstrip("\n")
        calls: list[Call] = []
        if asked.tools and asked.reads_calls:
            is_cut = answer.finish_reason == "length"
            calls = self._read_calls(asked.tools, CutText(text) if is_cut else text, number)
        if calls:
            text = text.partition(TAG)[0].strip() if TAG in text else ""
        answered = AnsweredCompletion(
            id=answer_id, text=text, thinking=thinking, calls=calls, answer=answer
        )
        return self._told(asked, answered, before)

    def _shown_by_family(
        self,
        asked: AskedCompletion,
        answer_id: str,
        number: int,
        answer: Answer,
        text: str,
        before: str,
    ) -> AnsweredCompletion:
        """Does as `shown` with what a family's parser reads in a text."""
        assert isinstance(self.parser, FamilyParser)
        turn = self.parser.read(text)
        found: Sequence[ToolCall] = turn.calls
        if answer.finish_reason == "length":
            found = self.parser.parse_cut(text)
        calls: list[Call] = []
        said = said_in(text, self.parser)
        if asked.tools and asked.reads_calls:
            calls = self._calls_of(asked.tools, found, number)
        if calls:
            said = turn.text
        answered = AnsweredCompletion(
            id=answer_id, text=said, thinking=turn.thinking, calls=calls, answer=answer
        )
        return self._told(asked, answered, before)

    def _calls_of(self, tools: list[Json], found: Sequence[ToolCall], number: int) -> list[Call]:
        """Returns calls for a client; one that cannot be read leaves all of them text."""
        names = {tool["function"]["name"] for tool in tools}
        calls = []
        for place, call in enumerate(found):
            if call.may_be_text and call.name not in names:
                continue
            arguments = {} if call.error_kind else typed_arguments(call, tools)
            if call.error_kind or not is_strict(arguments):
                self.unread += 1
                return []
            # Nine letters and digits, as Mistral's templates require.
            call_id = call.call_id or f"call{number % 1000:03d}{place:02d}"
            calls.append(Call(id=call_id, name=call.name, arguments=json.dumps(arguments)))
        return calls

    def _told(
        self, asked: AskedCompletion, answered: AnsweredCompletion, before: str
    ) -> AnsweredCompletion:
        """Remembers an answer that a client gets."""
        # A request that continues ids has no messages.
        if asked.messages:
            self._remember(asked.speaker, before, answered)
        return answered

    def _remember(self, speaker: Speaker, before: str, answered: AnsweredCompletion) -> None:
        """Remembers what an answer looks like, and where it stands."""
        calls = [(call.name, call.arguments) for call in answered.calls]
        looks = {look_of(answered.text, calls, answered.thinking)}
        if self.adds_thinking:
            looks.add(look_of(answered.text, calls))
        sampled = answered.answer.text
        for look in looks:
            place = (speaker, before, look)
            is_only = self.by_place.get(place, sampled) == sampled
            self.by_place[place] = sampled if is_only else None

    def _read_calls(self, tools: list[Json], text: str, number: int) -> list[Call]:
        """Reads the tool calls in a text; one that cannot be read leaves all of it text."""
        names = {tool["function"]["name"] for tool in tools}
        found = [
            call
            for call in calls_of(text, self.parser)
            if call.name in names or not call.may_be_text
        ]
        if any(call.error_kind or not is_strict(call.arguments) for call in found):
            self.unread += 1
            return []
        return [
            Call(id=f"call_{number}_{place}", name=call.name, arguments=arguments_of(call, tools))
            for place, call in enumerate(found)
        ]


def is_strict(arguments: Any) -> bool:
    """Checks whether every client can read a call's arguments, and send them back.

    Python's JSON has NaN and Infinity; that of other languages' clients has not.
    """
    try:
        json.dumps(arguments, allow_nan=False)
        check_depth(arguments, MAX_CALL_DEPTH)
    except (ValueError, RecursionError):
        return False
    return True


def arguments_of(call: ToolCall, tools: list[Json]) -> str:
    """Writes a call's arguments as JSON; a text stands for the tool's one parameter."""
    if not isinstance(call.arguments, str):
        return json.dumps(call.arguments)
    for tool in tools:
        function = tool["function"]
        if function["name"] == call.name:
            for name in (function.get("parameters") or {}).get("properties") or {}:
                return json.dumps({name: call.arguments})
    return json.dumps({"input": call.arguments})


def message_of(answered: AnsweredCompletion) -> Json:
    """Returns an answer as the message that a client sends back."""
    message: Json = {"role": "assistant", "content": answered.text}
    if answered.calls:
        message["tool_calls"] = [
            tool_call(call.id, call.name, call.arguments) for call in answered.calls
        ]
    return message


def calls_in(message: Json) -> list[tuple[str, Any]]:
    """Lists the calls of a message as (name, arguments)."""
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]


def without_thinking(message: Json) -> Json:
    """Returns a message without its thinking."""
    return {name: value for name, value in message.items() if name != THINKING_KEY}


def look_of(text: str, calls: list[tuple[str, Any]], thinking: str = "") -> str:
    """Returns what an answer looks like to a client; white space around its texts aside."""
    read_calls = []
    for name, arguments in calls:
        value = arguments
        if isinstance(arguments, str):
            try:
                value = json.loads(arguments)
            except ValueError:
                value = arguments
        read_calls.append([name, value])
    return ENCODER.encode([text.strip(), read_calls, thinking.strip()])


def digest(before: str, message: Json) -> str:
    """Returns what stands for a conversation that goes on by a message; ids of calls aside."""
    message = {name: value for name, value in message.items() if name != "tool_call_id"}
    if "tool_calls" in message:
        look = look_of(message["content"], calls_in(message))
        message = replace_call_ids(message, look)
    text = before + ENCODER.encode(message)
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()


def replace_call_ids(message: Json, look: str) -> Json:
    """Returns a message with what it looks like in place of its calls."""
    return {**message, "tool_calls": look}
