"""Requests of another form than any SDK's: each costs its client an error, and nobody else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from custom.tools.parsers import get_parser
from features.programs.exchange import Answer, Asked
from features.programs.other_sampling import other_sampling
from features.programs.protocols import PROTOCOLS
from features.programs.recall import Recall
from tests.features.programs.hostile import check, play
from tests.features.programs.test_recall import ASKED, shown
from tests.features.programs.test_server import Served, served, text_of
from tests.unit.test_turn_tokens import turn_tokens
from workers.rollout.engine import Sampling

__all__ = ["served"]

CHAT = "/v1/chat/completions"
DEEP = '{"a":' * 300 + "1" + "}" * 300


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


@pytest.mark.parametrize(
    ("path", "odd"),
    [
        (CHAT, {"tools": ["x"]}),
        (CHAT, {"tools": "x"}),
        (CHAT, {"tools": {"a": 1}}),
        (CHAT, {"tools": [{"type": "function", "function": None}]}),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "add"}}]}),
        (CHAT, function(name=["add"])),
        (CHAT, function(name="add", parameters=[1])),
        (CHAT, function(name="add", parameters={"properties": ["a"]})),
        ("/v1/messages", {"tools": [{"name": ["add"], "input_schema": {}}]}),
        ("/v1/messages", {"tools": [{"name": "add", "input_schema": [1]}]}),
        ("/v1/responses", {"tools": [{"type": "function", "name": 5}]}),
        (CHAT, {"messages": [{"role": 5, "content": "Hello"}]}),
        ("/v1/messages", {"messages": [{"role": None, "content": "Hello"}]}),
        (CHAT, {"temperature": 10**400}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 10**400}}),
        (CHAT, function(name="add", parameters=json.loads(DEEP))),
        (CHAT, {"stream": "no"}),
        ("/inference/v1/generate", {"token_ids": [1], "stream": 1}),
    ],
)
def test_a_request_of_another_form_is_refused_and_the_next_one_is_answered(
    served: Served, path: str, odd: dict[str, Any]
) -> None:
    body = {"messages": ASKED, "input": "Hello", "max_tokens": 5} | odd
    response = served.send(json.dumps(body).encode(), path).getresponse()
    assert response.status == 400 and b'"error"' in response.read()
    connection = served.send()
    served.answer(served.heard(Asked))
    assert text_of(connection) == "Yes."


@pytest.mark.parametrize(
    ("path", "body", "rules"),
    [
        (CHAT, {"logit_bias": {"5": -100}, "min_tokens": 3}, ("logit_bias", "min_tokens")),
        (CHAT, {"logit_bias": {}, "min_tokens": 0, "bad_words": None}, ()),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"allowed_token_ids": [1], "bad_words": ["x"]}},
            ("bad_words", "allowed_token_ids"),
        ),
    ],
)
def test_rules_for_tokens_are_told_as_another_sampling_than_the_runs(
    served: Served, path: str, body: dict[str, Any], rules: tuple[str, ...]
) -> None:
    connection = served.send(json.dumps({"messages": ASKED} | body).encode(), path)
    asked = served.heard(Asked)
    assert asked.token_rules == rules
    told = other_sampling(asked, Sampling(max_tokens=5))
    assert [text.partition(" ")[0] for text in told] == list(rules)
    served.answer(asked)
    assert connection.getresponse().status == 200


def test_arguments_of_a_call_are_not_nested_without_end(served: Served) -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": DEEP}}
    told = [*ASKED, {"role": "assistant", "tool_calls": [call]}, *ASKED]
    response = served.send(json.dumps({"messages": told}).encode()).getresponse()
    assert response.status == 400 and "100 times at most" in response.read().decode()


def test_a_body_that_is_not_packed_as_it_says_is_told_so(served: Served) -> None:
    response = served.send(b"nonsense", Content_Encoding="gzip").getresponse()
    assert response.status == 400 and "gzip" in json.load(response)["error"]["message"]


def test_a_name_of_an_agent_may_be_any_bytes(served: Served) -> None:
    connection = served.send(X_Agent="\xff\xfe")
    asked = served.heard(Asked)
    assert asked.speaker.agent.encode()
    served.answer(asked)
    assert text_of(connection) == "Yes."


def test_a_tool_without_parameters_takes_a_call_whose_input_is_text() -> None:
    recall = Recall(get_parser("react"))
    tools = function(name="search", parameters=None)["tools"]
    [call] = shown(recall, "Action: search[some text]", tools=tools).calls
    assert json.loads(call.arguments) == {"input": "some text"}


def test_an_answer_of_thinking_alone_stays_in_its_conversation_when_it_comes_back() -> None:
    """Clients leave its empty text out, which Anthropic's servers do not take."""
    recall = Recall(get_parser("function"))
    shown(recall, "<think>\nHm.\n</think>")
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    sent = [*ASKED, {"role": "assistant", "content": [thinking]}, *ASKED]
    asked = PROTOCOLS["/messages"].read({"messages": sent})
    assert [message["role"] for message in asked.messages] == ["user", "assistant", "user"]
    assert recall.recalled(asked.messages).messages[1]["content"] == "<think>\nHm.\n</think>"


@pytest.mark.parametrize("number", range(9))
def test_what_no_engine_and_no_template_takes_costs_its_request_alone(number: int) -> None:
    moves = [("begin", 0), ("odd", number), ("odd", number), ("go_on", 0)]
    episode, pool, engine = play(moves, turn_tokens("smollm2"), random.Random(number).randrange(99))
    check(episode, pool, engine)
    assert episode.program["counts"]["refused"] >= 2


def test_who_tries_again_behind_an_error_of_the_engine_asks_anew(served: Served) -> None:
    connection = served.send()
    served.pool.answer(0, served.heard(Asked).number, Answer(refusal="engine", error="no"))
    assert connection.getresponse().status == 500
    again = served.send(x_stainless_retry_count="1")
    served.answer(served.heard(Asked))
    assert text_of(again) == "Yes."


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", "[" * 60 + "]" * 60])
def test_a_call_that_other_languages_cannot_read_is_text(value: str) -> None:
    recall = Recall(get_parser("function"))
    text = f'<tool_call>{{"name": "add", "arguments": {{"a": {value}}}}}</tool_call>'
    answer = shown(recall, text, **function(name="add"))
    assert (answer.text, answer.calls, recall.unread) == (text, [], 1)
