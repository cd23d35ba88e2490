"""The server of programs: retries, hang-ups, deadlines, bounds, what it refuses."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from custom.tools.parsers import get_parser
from features.programs import attempt, connections
from features.programs.attempt import Deadlines
from features.programs.connection_log import ConnectionLog
from features.programs.exchange import Answer, Asked, Exited, Gone
from features.programs.pool import ProgramPool
from features.programs.recall import Recall
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import YES

BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()


@dataclass
class Served:
    """A pool with one program, whose requests the test itself makes."""

    pool: ProgramPool
    base: str
    port: int
    events: list[Any] = field(default_factory=list)

    def send(self, body: bytes = BODY, path: str = "/v1/chat/completions", **headers: str) -> Any:
        """Sends a request; the caller reads its response, or closes the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request("POST", self.base + path, body, named)
        return connection

    def heard(self, kind: type, seconds: float = 10.0) -> Any:
        """Waits for the next event, which is to be of this kind."""
        until = time.monotonic() + seconds
        while not self.events and time.monotonic() < until:
            self.events += [event for _, event in self.pool.poll(0.2)]
        if not self.events:
            return None
        event = self.events.pop(0)
        assert isinstance(event, kind), event
        return event

    def answer(self, asked: Asked, text: str = "Yes.") -> None:
        self.pool.answer(0, asked.number, Answer(text=text, token_ids=(1,), log_probs=(-1.0,)))


def text_of(connection: http.client.HTTPConnection) -> str:
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]


def begin(pool: ProgramPool) -> Served:
    pool.reset(0, 0, 0)
    until = time.monotonic() + 10
    while not pool._attempts and time.monotonic() < until:
        time.sleep(0.01)
    token = pool._attempts[0].token
    return Served(pool, f"/e/{token}", pool._server.port)


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """Yields a pool whose program sleeps; `indirect` settings are its spec's."""
    settings = dict(getattr(request, "param", {}))
    seconds = settings.pop("sleeps", 60)
    command = (sys.executable, "-c", f"import time; time.sleep({seconds})")
    spec = ProgramSpec(command=command, **settings)
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        yield begin(pool)


@pytest.mark.seconds
def test_a_client_that_was_cut_off_and_asks_again_gets_the_one_answer(served: Served) -> None:
    first = served.send()
    asked = served.heard(Asked)
    first.close()
    time.sleep(0.2)
    second = served.send()
    served.answer(asked)
    assert text_of(second) == "Yes."
    assert served.heard(Asked, 0.5) is None, "it is one request"


def test_a_delivered_answer_comes_never_again(served: Served) -> None:
    first = served.send()
    served.answer(served.heard(Asked), "First")
    assert text_of(first) == "First"
    for number, text in (("1", "Second"), ("0", "Third")):
        again = served.send(x_stainless_retry_count=number)
        served.answer(served.heard(Asked), text)
        assert text_of(again) == text, "an answer of its own"


@pytest.mark.seconds
def test_a_retry_takes_the_answer_that_waits_and_none_that_was_delivered(served: Served) -> None:
    """A client asks the same thing three times, each time with too short a time-out."""
    heard = []
    for text in ("One", "Two", "Three"):
        cut_off = served.send()
        asked = served.heard(Asked)
        cut_off.close()
        time.sleep(0.2)
        served.answer(asked, text)
        heard.append(text_of(served.send(x_stainless_retry_count="1")))
    assert heard == ["One", "Two", "Three"]
    assert served.heard(Asked, 0.3) is None


@pytest.mark.seconds
def test_retries_of_four_at_once_get_four_answers(served: Served) -> None:
    cut_off = [served.send() for _ in range(4)]
    asked = [served.heard(Asked) for _ in range(4)]
    for connection in cut_off:
        connection.close()
    time.sleep(0.3)
    again = [served.send(x_stainless_retry_count="1") for _ in range(4)]
    time.sleep(0.2)
    for number, request in enumerate(asked):
        served.answer(request, f"Answer {number}")
    assert sorted(map(text_of, again)) == [f"Answer {number}" for number in range(4)]


def test_a_retry_of_what_another_still_waits_for_is_a_request_of_its_own(served: Served) -> None:
    first = served.send()
    served.answer(served.heard(Asked), "Delivered")
    assert text_of(first) == "Delivered"
    waits = served.send()
    asked = served.heard(Asked)
    retry = served.send(x_stainless_retry_count="1")
    served.answer(served.heard(Asked), "Of its own")
    served.answer(asked, "Waited for")
    assert (text_of(waits), text_of(retry)) == ("Waited for", "Of its own")


def test_an_answer_that_nobody_comes_back_for_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "RETRY_S", 0.3)
    first = served.send()
    asked = served.heard(Asked)
    first.close()
    assert served.heard(Gone).number == asked.number
    served.answer(asked)
    again = served.send()
    other = served.heard(Asked)
    assert other.number != asked.number
    served.answer(other)
    assert text_of(again) == "Yes."


def test_two_alike_at_once_are_two_requests(served: Served) -> None:
    first, second = served.send(), served.send()
    answers = []
    for text in ("One", "Two"):
        served.answer(served.heard(Asked), text)
    for connection in (first, second):
        answers.append(text_of(connection))
    assert sorted(answers) == ["One", "Two"]


@pytest.mark.parametrize("served", [{"request_timeout_s": 0.3}], indirect=True)
def test_a_request_that_waits_too_long_hears_so_and_may_come_back(served: Served) -> None:
    first = served.send()
    asked = served.heard(Asked)
    response = first.getresponse()
    assert response.status == 504 and b"request_timeout_s" in response.read()
    second = served.send(x_stainless_retry_count="1")
    served.answer(asked)
    assert text_of(second) == "Yes."


@pytest.mark.parametrize(
    ("refusal", "path", "status", "words"),
    [
        ("context_length", "/v1/chat/completions", 400, '"code": "context_length_exceeded"'),
        ("context_length", "/v1/messages", 400, "prompt is too long"),
        ("engine", "/v1/chat/completions", 500, "server_error"),
        ("ended", "/v1/messages", 410, '"type": "error"'),
        ("sampling", "/v1/chat/completions", 400, "invalid_sampling"),
    ],
)
def test_a_refusal_is_told_in_the_protocols_own_form(
    served: Served, refusal: Any, path: str, status: int, words: str
) -> None:
    connection = served.send(path=path)
    served.pool.answer(0, served.heard(Asked).number, Answer(refusal=refusal, error="no"))
    response = connection.getresponse()
    assert response.status == status and words in response.read().decode()


FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WANTS_A_CALL = [
    ("/v1/chat/completions", {"tool_choice": "required", "tools": [FUNCTION]}),
    (
        "/v1/responses",
        {"tool_choice": "required", "tools": [{"type": "function", "name": "add"}]},
    ),
    (
        "/v1/messages",
        {"tool_choice": {"type": "any"}, "tools": [{"name": "add", "input_schema": {}}]},
    ),
    (
        "/v1/chat/completions",
        {
            "tool_choice": {"type": "function", "function": {"name": "add"}},
            "tools": [FUNCTION],
        },
    ),
    (
        "/v1/responses",
        {
            "tool_choice": {"type": "function", "name": "add"},
            "tools": [{"type": "function", "name": "add"}],
        },
    ),
    (
        "/v1/messages",
        {
            "tool_choice": {"type": "tool", "name": "add"},
            "tools": [{"name": "add", "input_schema": {}}],
        },
    ),
]
SAID = {"messages": [{"role": "user", "content": "Hello"}], "input": "Hello", "max_tokens": 5}


@pytest.mark.parametrize(("path", "wanted"), WANTS_A_CALL)
def test_a_client_that_wants_a_call_is_answered_and_the_episode_hears_of_it(
    served: Served, path: str, wanted: dict[str, Any]
) -> None:
    """Agents of some makers ask so for each turn."""
    connection = served.send(json.dumps(SAID | wanted).encode(), path)
    asked = served.heard(Asked)
    assert asked.forces_call
    served.answer(asked)
    assert connection.getresponse().status == 200
    for choice in ("auto", "none"):
        free = {"type": choice} if path == "/v1/messages" else choice
        connection = served.send(json.dumps(SAID | wanted | {"tool_choice": free}).encode(), path)
        asked = served.heard(Asked)
        assert not asked.forces_call
        served.answer(asked)
        assert connection.getresponse().status == 200


@pytest.mark.parametrize(("path", "wanted"), WANTS_A_CALL)
@pytest.mark.parametrize(
    "odd", [{"tools": []}, {"tool_choice": "always"}, {"tool_choice": ["auto"]}]
)
def test_a_choice_of_tools_that_means_nothing_is_refused(
    served: Served, path: str, wanted: dict[str, Any], odd: dict[str, Any]
) -> None:
    response = served.send(json.dumps(SAID | wanted | odd).encode(), path).getresponse()
    assert response.status == 400 and b'"error"' in response.read()


def test_a_refused_stream_has_the_status_of_its_refusal(served: Served) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "stream": True})
    connection = served.send(body.encode())
    served.pool.answer(0, served.heard(Asked).number, Answer(refusal="context_length", error="no"))
    assert connection.getresponse().status == 400


@pytest.mark.seconds
@pytest.mark.parametrize("served", [{"sleeps": 1}], indirect=True)
def test_whoever_asks_after_the_end_hears_that_it_has_ended(served: Served) -> None:
    waiting = served.send()
    served.heard(Asked)
    assert served.heard(Exited).failure == "env_crash"
    assert waiting.getresponse().status == 410
    served.pool.finish(0, "env_crash")
    time.sleep(0.2)
    assert served.send().getresponse().status == 410


@pytest.mark.seconds
def test_a_program_that_comes_between_two_episodes_waits_for_the_next() -> None:
    """By hand a model is served to one episode after another, all by one token."""
    spec = ProgramSpec(token="lasting")
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        for key in range(2):
            served = Served(pool, "/e/lasting", pool._server.port)
            early = served.send()
            time.sleep(0.3)
            pool.reset(key, 0, 0)
            asked = served.heard(Asked)
            pool.answer(key, asked.number, Answer(text="Early", token_ids=(1,), log_probs=(-1.0,)))
            assert text_of(early) == "Early"
            assert served.send(path="/end").getresponse().status == 200
            served.heard(Exited)
            pool.finish(key, "done")
            # What the end of the episode says.
            assert pool.poll(5.0)


def test_headers_that_do_not_come_close_their_connection(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.3)
    slow = socket.create_connection(("127.0.0.1", served.port), timeout=5)
    slow.sendall(b"POST /e/x HTTP/1.1\r\nHost: ")
    assert slow.recv(10) == b"", "closed"
    connection = served.send()
    served.answer(served.heard(Asked))
    assert text_of(connection) == "Yes."


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /e/x HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"POST /e/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    ],
)
def test_what_is_no_http_has_one_line_however_often_it_comes(
    served: Served, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", served.port), timeout=5) as broken:
            broken.sendall(sent)
            assert b" 400 " in broken.recv(100)
    told = [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
    assert [record.levelname for record in told] == ["WARNING"]
    assert "a program broke its connection" in caplog.text
    assert "Traceback" not in caplog.text
    assert served.pool._server._log.faults == 3


def test_an_error_of_the_servers_own_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = ConnectionLog(logging.getLogger("mine"))
    log.exception("Error handling request from %s", "x", exc_info=KeyError("ours"))
    assert "KeyError: 'ours'" in caplog.text and log.faults == 0
    log.exception("Unhandled exception", exc_info=ConnectionResetError("gone"))
    log.exception("Unhandled exception", exc_info=ConnectionResetError("gone"))
    log.tell_count()
    assert caplog.text.count("ConnectionResetError: gone") == 1
    assert "programs broke 2 connections in all" in caplog.text


@pytest.mark.parametrize("files", [4, 1024])
def test_a_new_connection_finds_room_by_the_one_that_was_silent_for_longest(
    monkeypatch: pytest.MonkeyPatch, served: Served, files: int
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4 if files == 4 else 2)
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (files, files))
    held = []
    for _ in range(2):
        held.append(socket.create_connection(("127.0.0.1", served.port), timeout=5))
        time.sleep(0.1)
    third = served.send()
    asked = served.heard(Asked)
    assert held[0].recv(10) == b"", "closed"
    fourth = served.send(json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode())
    assert held[1].recv(10) == b"", "closed"
    # Nothing of an episode that is being answered gives way, and there is no room for a fifth.
    assert fourth.getresponse().status == 429
    served.answer(asked)
    assert text_of(third) == "Yes."


def idle_connection(served: Served) -> socket.socket:
    """Opens a connection whose one request has been answered."""
    opened = socket.create_connection(("127.0.0.1", served.port), timeout=5)
    opened.sendall(f"GET {served.base}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert opened.recv(10_000).startswith(b"HTTP/1.1 200")
    return opened


def test_an_episode_that_has_too_many_connections_loses_those_that_are_idle(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(connections, "MAX_OF_EPISODE", 3)
    waits = served.send()
    asked = served.heard(Asked)
    held = [idle_connection(served) for _ in range(4)]
    assert [opened.recv(10) for opened in held[:2]] == [b"", b""], "the ones that idled longest"
    for opened in held[2:]:
        opened.sendall(f"GET {served.base}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert opened.recv(10_000).startswith(b"HTTP/1.1 200")
    served.answer(asked)
    assert text_of(waits) == "Yes."


def test_requests_of_an_episode_above_its_bound_are_told_so_and_others_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_OF_EPISODE", 3)
    spec = ProgramSpec(command=(sys.executable, "-c", "import time; time.sleep(60)"))
    with ProgramPool({0: spec}, deadlines=Deadlines(), max_tokens=64) as pool:
        first = begin(pool)
        waiting = [first.send() for _ in range(3)]
        asked = [first.heard(Asked) for _ in range(3)]
        for path, kind in (("/v1/chat/completions", "code"), ("/v1/messages", "type")):
            refused = first.send(path=path).getresponse()
            told = json.load(refused)["error"][kind]
            assert refused.status == 429 and told in ("too_many_requests", "rate_limit_error")
        pool.reset(1, 0, 0)
        while len(pool._attempts) < 2:
            time.sleep(0.01)
        other = Served(pool, f"/e/{pool._attempts[1].token}", first.port)
        answered = other.send()
        request = other.heard(Asked)
        pool.answer(1, request.number, YES)
        assert text_of(answered) == "Yes."
        for request in asked:
            first.answer(request)
        assert [text_of(connection) for connection in waiting] == ["Yes."] * 3
        again = first.send()
        first.answer(first.heard(Asked))
        assert text_of(again) == "Yes."


@pytest.mark.seconds
@pytest.mark.parametrize("served", [{"sleeps": 0.5, "reward": "exit_code"}], indirect=True)
def test_what_an_ended_episode_holds_open_is_closed(served: Served) -> None:
    held = idle_connection(served)
    served.heard(Exited)
    served.pool.finish(0, "done")
    assert held.recv(10) == b""
    ended = served.send()
    response = ended.getresponse()
    assert response.status == 410 and response.headers["Connection"] == "close"


def test_connections_that_clients_closed_are_forgotten(
    monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    monkeypatch.setattr(connections, "BEGINS_S", 0.0)
    for _ in range(300):
        idle_connection(served).close()
    kept = served.pool._server._connections
    assert kept is not None and len(kept._kept) <= 2 * connections.SWEEP_FROM
    assert kept._held.total() == len(kept._kept)


def test_no_token_can_be_guessed_and_the_address_is_this_machine_alone(served: Served) -> None:
    assert len(served.base) > 30 and served.pool._server.host == "127.0.0.1"
    other = Served(served.pool, "/e/" + "x" * 32, served.port)
    assert other.send().getresponse().status == 401


@pytest.mark.seconds
def test_a_program_that_waits_for_a_processor_is_given_its_time() -> None:
    told: list[Any] = []
    waited = [0.0]

    async def work() -> Any:
        made = attempt.Attempt(
            key=0,
            spec=ProgramSpec(),
            seed=0,
            task="{}",
            token="t",
            recall=Recall(get_parser("function")),
            deadlines=Deadlines(step_s=0.2),
            tell=lambda key, event: told.append(event),
            kill=lambda: told.append("killed"),
            waited=lambda: waited[0],
        )
        made.start_clock()
        await asyncio.sleep(0.1)
        # Half of a second it was ready to run, and did not.
        waited[0] = 0.5
        await asyncio.sleep(0.4)
        assert not told
        await asyncio.sleep(0.4)
        return made

    made = asyncio.run(work())
    assert told == ["killed"] and "its own" in made.failure
    assert 0.15 < made.used_s < 0.45


@pytest.mark.seconds
def test_deadlines_run_while_nothing_is_sampled_and_stand_still_while_something_is() -> None:
    spec = ProgramSpec(command=(sys.executable, "-c", "import time; time.sleep(60)"))
    deadlines = Deadlines(step_s=1.0)
    with ProgramPool({0: spec}, deadlines=deadlines, max_tokens=64) as pool:
        served = begin(pool)
        connection = served.send()
        asked = served.heard(Asked)
        time.sleep(1.5)
        assert served.heard(Exited, 0.1) is None, "its answer takes long, not the program"
        pool.answer(0, asked.number, YES)
        assert text_of(connection) == "Yes."
        exited = served.heard(Exited)
        assert exited.failure == "env_timeout" and "agent.step_timeout_s=1.0" in exited.error
