"""Tests that programs get calls and thinking of every family, and that their rows then grow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from features.programs.exchange import Answer, AskedCompletion
from features.programs.protocols import anthropic_messages, chat_completions
from features.programs.recall import Recall
from features.shared.conversations import Conversations
from tests.zoo.tool_forms import TOOL_FORMS, ToolForm
from tests.zoo.tool_proofs import QUESTION, PlayedForm
from workers.rollout.engine import Completion
from workers.rollout.episode import TurnLimits

EVERY_FORM = [pytest.param(form, id=name) for name, form in TOOL_FORMS.items()]


class Program:
    """Asks as a program does, and is answered with given texts."""

    def __init__(self, form: ToolForm) -> None:
        self.played = PlayedForm.of(form)
        self.recall = Recall(self.played.parser)
        self.rows: list[Any] = []
        limits = TurnLimits(prompt_length=5000, response_length=5000, max_model_len=10000)
        self.conversations = Conversations(self.played.tokens, limits, self.rows)
        self.messages: list[dict[str, Any]] = [dict(QUESTION[0])]
        self.number = 0

    def ask(self, sampled: str) -> tuple[str, Any]:
        """Asks for the next turn; returns what became of the row, and the answer."""
        tools = self.played.tools
        read = [chat_completions.read_message(message) for message in self.messages]
        recalled = self.recall.recalled(read, tools=tools)
        place = self.conversations.place(recalled.messages, tools)
        assert place is not None
        row = self.conversations.enter(place)
        ids = self.played.ids(sampled)
        completion = Completion(
            request_id="0", token_ids=ids, log_probs=[0.0] * len(ids), finish_reason="stop"
        )
        row.append_sampled(completion, self.number)
        self.conversations.leave(place, self.number, ids)
        self.number += 1
        asked = AskedCompletion(messages=read, tools=tools)
        answer = Answer(text=self.played.tokens.text(ids))
        answered = self.recall.shown(asked, str(self.number), self.number, answer, recalled.digest)
        return place.kind, answered

    def go_on(self, answered: Any) -> None:
        """Appends an answer as clients send it back, and the results of its calls."""
        message = chat_completions.message_of(answered)
        self.messages.append(message)
        for call in message.get("tool_calls", ()):
            result = {"role": "tool", "content": "found", "tool_call_id": call["id"]}
            self.messages.append({**result, "name": call["function"]["name"]})


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_call_comes_in_the_protocols_form_and_its_row_grows(form: ToolForm) -> None:
    program = Program(form)
    _, answered = program.ask(form.sampled)
    [call] = answered.calls
    assert (call.name, json.loads(call.arguments)) == ("search", {"q": "a b", "n": 3})
    assert answered.text == ""
    assert answered.finish_reason == "tool_calls"
    program.go_on(answered)
    kind, _ = program.ask("It is 5.")
    assert kind == "grows"
    assert len(program.rows) == 1


@pytest.mark.parametrize("form", EVERY_FORM)
def test_thinking_comes_in_the_protocols_own_fields(form: ToolForm) -> None:
    if form.thinking is None:
        return
    opens, closes = form.thinking
    program = Program(form)
    sampled = opens + "hm" + closes + form.sampled.removeprefix("hm\n</think>\n\n")
    _, answered = program.ask(sampled)
    assert answered.thinking == "hm"
    assert len(answered.calls) == 1
    asked = AskedCompletion(messages=[], tools=program.played.tools)
    message = chat_completions.message_of(answered)
    assert message["reasoning_content"] == "hm"
    [thinking, called] = anthropic_messages.write(asked, answered)["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert called["input"] == {"q": "a b", "n": 3}
    program.go_on(answered)
    kind, _ = program.ask("It is 5.")
    assert kind == "grows"


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_call_that_was_cut_stays_text(form: ToolForm) -> None:
    program = Program(form)
    _, answered = program.ask(form.sampled[: form.sampled.index("a b") + 2])
    assert answered.calls == []
    assert program.recall.unread == 1
