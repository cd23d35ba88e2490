"""The error of a conversation without room, in the words that agents' libraries look for."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from features.programs.attempt import Deadlines
from features.programs.exchange import Answer, Asked
from features.programs.pool import ProgramPool
from features.programs.protocols.protocol import too_long
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import YES
from tests.features.programs.test_server import Served, begin

MESSAGES = {"messages": [{"role": "user", "content": "Hello"}], "input": "Hello", "max_tokens": 5}
REFUSED = Answer(refusal="context_length", error=too_long(9000, 4000, "Why."))


@pytest.fixture
def served() -> Iterator[Served]:
    spec = ProgramSpec(command=(sys.executable, "-c", "import time; time.sleep(60)"))
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        yield begin(pool)


def without_room(served: Served, client: Callable[[str], Any]) -> Any:
    """Runs a client in a thread; each request with `long` in it has no room."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(client(f"http://127.0.0.1:{served.port}{served.base}/v1"))
        # The test looks at it.
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        for _, heard in served.pool.poll(0.2):
            if isinstance(heard, Asked):
                is_long = "long" in json.dumps(heard.messages)
                served.pool.answer(0, heard.number, REFUSED if is_long else YES)
    [result] = found
    return result


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_each_protocol_says_it_in_the_words_of_its_servers(
    served: Served, path: str, stream: bool
) -> None:
    connection = served.send(json.dumps(MESSAGES | {"stream": stream}).encode(), path)
    served.pool.answer(0, served.heard(Asked).number, REFUSED)
    response = connection.getresponse()
    error = json.load(response)["error"]
    assert response.status == 400
    if path == "/v1/messages":
        assert re.match(r"prompt is too long: 9000 tokens > 4000 maximum", error["message"])
        return
    assert error["code"] == "context_length_exceeded"
    for words in (
        "This model's maximum context length is 4000 tokens",
        "prompt is too long: 9000 tokens > 4000 maximum",
        "exceeds the context window",
        "reduce the length of the messages",
    ):
        assert words in error["message"]


def test_a_body_that_is_too_large_says_the_same(served: Served) -> None:
    text = "x" * (served.pool._server.max_bytes + 1)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5}
    for path, words in (
        ("/v1/chat/completions", "maximum context length is 64 tokens"),
        ("/v1/messages", '"prompt is too long: '),
    ):
        response = served.send(json.dumps(body).encode(), path).getresponse()
        told = response.read().decode()
        assert response.status == 400 and words in told


@pytest.mark.seconds
@pytest.mark.parametrize("more", [{}, {"use_responses_api": True}, {"streaming": True}])
def test_langchain_knows_it_so_that_its_agents_compact(
    served: Served, more: dict[str, Any]
) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.exceptions import ContextOverflowError

    def client(url: str) -> Any:
        model = langchain_openai.ChatOpenAI(model="gpt-4o", base_url=url, api_key="x", **more)
        try:
            return model.invoke("long text")
        except ContextOverflowError:
            return model.invoke("short text")

    assert without_room(served, client).text == "Yes."


@pytest.mark.parametrize("maker", ["openai", "anthropic"])
def test_litellm_knows_it_so_that_its_agents_compact(served: Served, maker: str) -> None:
    litellm = pytest.importorskip("litellm")

    def client(url: str) -> Any:
        settings = {"model": f"{maker}/gpt-4o", "api_key": "x", "max_tokens": 5}
        settings["api_base"] = url.removesuffix("/v1") if maker == "anthropic" else url
        try:
            asked = [{"role": "user", "content": "long text"}]
            return litellm.completion(messages=asked, **settings)
        except litellm.ContextWindowExceededError:
            asked = [{"role": "user", "content": "short text"}]
            return litellm.completion(messages=asked, **settings)

    answered = without_room(served, client)
    assert answered.choices[0].message.content == "Yes."
