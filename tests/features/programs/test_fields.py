"""What becomes of every field of a request: none that matters is ignored in silence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from features.programs.attempt import Deadlines
from features.programs.exchange import Asked
from features.programs.other_sampling import other_sampling
from features.programs.pool import ProgramPool
from features.programs.protocols import fields
from features.programs.protocols.fields import TABLES
from features.programs.spec import ProgramSpec
from tests.features.programs.test_server import Served, begin
from workers.rollout.engine import Sampling

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
TOKEN_IN = "/inference/v1/generate"
HELLO = [{"role": "user", "content": "Hello"}]
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 5},
    TOKEN_IN: {"token_ids": [1]},
}
# A value for each field that asks for something else than what is done.
ODD = {"n": 2, "top_logprobs": 3, "best_of": 2, "add_generation_prompt": False}
CASES = [
    (path, name)
    for path, table in TABLES.items()
    if path in NEEDED
    for name, field in table.items()
    if field.handling in ("refused", "overridden")
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    spec = ProgramSpec(command=(sys.executable, "-c", "import time; time.sleep(600)"))
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        yield begin(pool)


def body_with(path: str, name: str, value: Any) -> bytes:
    parent, _, part = name.rpartition(".")
    given = {parent: {part: value}} if parent else {name: value}
    return json.dumps(NEEDED[path] | given).encode()


@pytest.mark.parametrize(("path", "name"), CASES)
def test_what_changes_an_answer_is_refused_or_the_episode_hears_of_it(
    served: Served, path: str, name: str
) -> None:
    last = name.rpartition(".")[2]
    is_number = name in fields.COMPARED or last == "min_tokens"
    value = ODD.get(last, 0.25 if is_number else {"type": "odd"})
    connection = served.send(body_with(path, name, value), path)
    if TABLES[path][name].handling == "refused":
        response = connection.getresponse()
        told = response.read().decode()
        assert response.status == 400 and f"{name}=" in told and "not served here" in told
        assert ('"type": "error"' in told) == (path == MESSAGES)
        return
    asked = served.heard(Asked)
    [difference] = other_sampling(asked, Sampling(max_tokens=5))
    assert last in difference
    served.answer(asked)
    assert connection.getresponse().status == 200


@pytest.mark.parametrize("path", NEEDED)
def test_neutral_values_and_nothing_are_served(served: Served, path: str) -> None:
    for name, field in TABLES[path].items():
        if field.handling not in ("refused", "overridden"):
            continue
        for value in (None, *field.neutral):
            connection = served.send(body_with(path, name, value), path)
            asked = served.heard(Asked)
            assert not other_sampling(asked, Sampling(max_tokens=5)), (name, value)
            served.answer(asked)
            assert connection.getresponse().status == 200


@pytest.mark.parametrize("path", NEEDED)
def test_a_field_that_nobody_knows_is_counted(served: Served, path: str) -> None:
    [attempt] = served.pool._attempts.values()
    before = attempt.counts["ignored"]
    connection = served.send(body_with(path, "thinks_twice", 1), path)
    served.answer(served.heard(Asked))
    assert connection.getresponse().status == 200
    assert attempt.counts["ignored"] == before + 1


@pytest.mark.seconds
def test_every_field_of_the_clients_own_libraries_stands_in_a_table() -> None:
    openai = pytest.importorskip("openai")
    anthropic = pytest.importorskip("anthropic")
    from anthropic.types import message_create_params as messages
    from anthropic.types.beta import message_create_params as beta_messages
    from openai.types import responses
    from openai.types.chat import completion_create_params as chat

    assert openai and anthropic
    of = {
        CHAT: [chat.CompletionCreateParamsBase],
        RESPONSES: [responses.response_create_params.ResponseCreateParamsBase],
        MESSAGES: [messages.MessageCreateParamsBase, beta_messages.MessageCreateParamsBase],
    }
    for path, kinds in of.items():
        for kind in kinds:
            assert set(kind.__annotations__) <= set(TABLES[path]), path


def test_a_thread_is_refused_so_that_the_whole_conversation_comes(served: Served) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "m"}):
        response = served.send(body_with(MESSAGES, "thread", thread), MESSAGES).getresponse()
        error = json.load(response)["error"]
        assert response.status == 400 and error["type"] == "invalid_request_error"
        assert error["details"] == {"error_code": "thread_unsupported_request"}


def test_the_docs_page_is_made_of_the_tables() -> None:
    page = Path(fields.__file__).parents[1] / "fields.md"
    assert page.read_text() == fields.written()


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_key_is_known_however_its_scheme_is_written(served: Served, scheme: str) -> None:
    token = served.base.rpartition("/")[2]
    other = Served(served.pool, "", served.port)
    connection = other.send(body_with(CHAT, "user", "x"), Authorization=f"{scheme} {token}")
    served.answer(served.heard(Asked))
    assert connection.getresponse().status == 200


def test_errors_under_anthropics_paths_are_anthropics(served: Served) -> None:
    other = Served(served.pool, "/e/" + "x" * 32, served.port)
    for base, path, status, kind in (
        (other, MESSAGES, 401, "authentication_error"),
        (served, "/v1/messages/batches", 404, "not_found_error"),
        (other, "/v1/messages/batches", 401, "authentication_error"),
    ):
        response = base.send(b"{}", path).getresponse()
        told = json.load(response)
        assert response.status == status
        assert (told["type"], told["error"]["type"]) == ("error", kind)
