"""What clients ask for beside answers, and tools that stand in namespaces."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from custom.tools.parsers import get_parser
from features.programs.attempt import Deadlines
from features.programs.exchange import Answer, AnsweredCompletion, Asked, Call, Exited
from features.programs.pool import ProgramPool
from features.programs.protocols import PROTOCOLS, ProtocolError
from features.programs.recall import Recall
from features.programs.spec import ProgramSpec
from tests.features.programs.test_helper_requests import TITLE, USER, Talk
from tests.features.programs.test_server import Served, begin

COUNT = "/v1/messages/count_tokens"
TOOL = {
    "type": "function",
    "name": "search",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
NAMESPACE = {"type": "namespace", "name": "mcp__web__", "description": "", "tools": [TOOL]}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    spec = ProgramSpec(command=(sys.executable, "-c", "import time; time.sleep(600)"))
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        yield begin(pool)


def test_a_request_to_count_is_told_its_tokens(served: Served) -> None:
    body = json.dumps({"messages": [USER], "system": "Be brief."}).encode()
    for _ in range(2):
        connection = served.send(body, COUNT)
        asked = served.heard(Asked)
        assert asked.only_counts and [message["role"] for message in asked.messages] == [
            "system",
            "user",
        ]
        served.pool.answer(0, asked.number, Answer(prompt_tokens=17))
        assert json.load(connection.getresponse()) == {"input_tokens": 17}
    other = Served(served.pool, "/e/" + "x" * 32, served.port)
    refused = json.load(other.send(body, COUNT).getresponse())
    assert refused["error"]["type"] == "authentication_error"


def test_to_count_is_no_turn_and_changes_none() -> None:
    seen = []
    for counts in (False, True):
        talk = Talk()
        for messages in ([TITLE, USER], [USER]):
            if counts:
                size = len(talk.tokens.prompt(messages))
                number = 100 + len(messages)
                asked = Asked(number=number, messages=messages, only_counts=True)
                [told] = talk.play.send(asked).asks
                assert told.args == (number, Answer(prompt_tokens=size))
            talk.ask(*messages)
        talk.play.send(Asked(number=200, messages=[{"role": 5}], only_counts=True))
        talk.play.send(Exited(reward=1.0, undelivered=()))
        seen.append((talk.seeds, talk.given, talk.spans(), len(talk.episode.turns)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", ["policy", "gpt-4o", "org/model-7b"])
def test_a_model_is_described_by_its_name(served: Served, name: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    connection.request("GET", f"{served.base}/v1/models/{name}")
    told = json.load(connection.getresponse())
    assert (told["id"], told["object"], told["type"]) == (name, "model", "model")


def called(tools: list[dict[str, Any]], text: str) -> tuple[Any, AnsweredCompletion]:
    asked = PROTOCOLS["/responses"].read({"input": "Hello", "tools": tools})
    recall = Recall(get_parser("function"))
    before = recall.recalled(asked.messages).digest
    return asked, recall.shown(asked, "id", 1, Answer(text=text), before)


@pytest.mark.parametrize("namespace", ["mcp__web__", "web"])
def test_a_tool_of_a_namespace_is_called_by_both_names_and_comes_back(namespace: str) -> None:
    name = f"{namespace.removesuffix('__')}__search"
    text = f'<tool_call>{{"name": "{name}", "arguments": {{"q": "x"}}}}</tool_call>'
    tools = [TOOL, NAMESPACE | {"name": namespace}]
    asked, answered = called(tools, text)
    assert [tool["function"]["name"] for tool in asked.tools] == ["search", name]
    protocol = PROTOCOLS["/responses"]
    [item] = protocol.write(asked, answered)["output"]
    assert (item["namespace"], item["name"]) == (namespace, "search")
    events = "".join(protocol.events(asked, answered))
    assert f'"namespace": "{namespace}"' in events
    again = protocol.read({"input": [USER, item], "tools": tools}).messages[1]
    assert again["tool_calls"][0]["function"] == {"name": name, "arguments": {"q": "x"}}
    _, plain = called(tools, '<tool_call>{"name": "search", "arguments": {}}</tool_call>')
    [item] = protocol.write(asked, plain)["output"]
    assert item["name"] == "search" and "namespace" not in item


@pytest.mark.parametrize(
    "tools",
    [
        [NAMESPACE, NAMESPACE],
        [NAMESPACE, TOOL | {"name": "mcp__web__search"}],
        [NAMESPACE | {"tools": [{"type": "custom", "name": "patch"}]}],
    ],
)
def test_namespaces_that_cannot_be_served_are_refused(tools: list[dict[str, Any]]) -> None:
    with pytest.raises(ProtocolError):
        PROTOCOLS["/responses"].read({"input": "Hello", "tools": tools})


def test_the_sdk_reads_every_event_of_an_answer_with_thinking_and_a_namespace() -> None:
    types = pytest.importorskip("openai.types.responses")
    asked, answered = called([NAMESPACE], "<think>\nHm.\n</think>\n\nSo.")
    call = Call(id="1", name="mcp__web__search", arguments="{}")
    both = AnsweredCompletion(
        id="1", text="So.", thinking=answered.thinking, calls=[call], answer=answered.answer
    )
    adapter = TypeAdapter(types.ResponseStreamEvent)
    kinds = []
    for event in PROTOCOLS["/responses"].events(asked, both):
        data = json.loads(event.partition("data: ")[2])
        kinds.append(adapter.validate_python(data).type)
    assert "response.reasoning_text.delta" in kinds
    done = types.Response.model_validate(data["response"])
    assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
