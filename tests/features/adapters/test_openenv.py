"""The adapter to OpenEnv: against a server of its package, and against bad ones written here."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import threading
import time
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from custom.confine import kill_tree
from custom.env_calls import reset_environment, step_environment
from custom.env_factory import make_environment
from tests.conftest import PROJECT

pytest.importorskip("websockets")
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Response
from websockets.sync.server import serve

TEXT = {
    "type": "object",
    "properties": {"guess": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["guess"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"cell": {"type": "integer"}}, "required": ["cell"]}


def observed(text: Any = "hello", reward: Any = None, done: Any = False) -> str:
    data = {"observation": {"text": text, "metadata": {}}, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def failed(code: str, message: str = "no", **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": message} | more})


@contextmanager
def openenv_like(
    answer: Callable[[dict[str, Any]], str | list[str] | None],
    schema: Any = TEXT,
    status: int = 200,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Runs a server that answers by a function; yields its URL and the messages that it got.

    Where the function returns None it closes the connection.
    """
    messages: list[dict[str, Any]] = []

    def respond(connection: Any, request: Any) -> Response | None:
        if request.path == "/ws":
            return None
        body = json.dumps({"action": schema}).encode()
        return Response(status, HTTPStatus(status).phrase, Headers(), body)

    def talk(connection: Any) -> None:
        try:
            for text in connection:
                messages.append(json.loads(text))
                reply = answer(messages[-1])
                if reply is None:
                    return
                for text in [reply] if isinstance(reply, str) else reply:
                    connection.send(text)
        except ConnectionClosed:
            return

    with serve(talk, "127.0.0.1", 0, process_request=respond) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.socket.getsockname()[1]
        yield f"http://127.0.0.1:{port}", messages
        server.shutdown()


def play_by(replies: dict[str, str | None]) -> Callable[[dict[str, Any]], str | None]:
    return lambda message: replies.get(message["type"])


def test_a_single_text_is_sent_as_it_is_and_the_seed_with_the_reset() -> None:
    replies = {"reset": observed("Guess."), "step": observed("Right.", 1, True)}
    with openenv_like(play_by(replies)) as (url, messages):
        env = make_environment(f"openenv:{url}", {"reset": {"level": 2}})
        assert reset_environment(env, 5, task={"hint": "!"}) == "Guess.\n\nAnswer with the guess."
        result = step_environment(env, '{"guess": 1}')
        assert result[:3] == ("Right.", 1.0, True)
        assert step_environment(env, "again").observation == env.OVER
        env.close()
    assert messages[0] == {"type": "reset", "data": {"level": 2, "hint": "!", "seed": 5}}
    assert messages[1] == {"type": "step", "data": {"guess": '{"guess": 1}'}}


@pytest.mark.parametrize(
    ("text", "sent"),
    [("4", 4), ('I take {"cell": 4}.', 4), ('{"cell": 4}', 4), ("four", None), ("4.5", None)],
)
def test_an_action_is_read_by_its_schema_and_what_is_none_is_answered(
    text: str, sent: int | None
) -> None:
    with openenv_like(lambda _: observed(), NUMBER) as (url, messages):
        env = make_environment(f"openenv:{url}", {"invalid_reward": -0.5})
        assert "Answer with a JSON object" in str(reset_environment(env, 1))
        result = step_environment(env, text)
        env.close()
    steps = [message["data"] for message in messages if message["type"] == "step"]
    if sent is None:
        assert steps == []
        assert result.reward == -0.5
        assert not result.done
        assert result.info == {"valid": False}
        assert str(result.observation).startswith("That is no action: ")
    else:
        assert steps == [{"cell": sent}]
        assert result.info == {"valid": True}


def test_what_the_server_refuses_as_an_action_is_answered() -> None:
    refusal = failed("VALIDATION_ERROR", errors=[{"msg": "cell is taken"}])
    with openenv_like(play_by({"reset": observed(), "step": refusal})) as (url, _):
        env = make_environment(f"openenv:{url}")
        reset_environment(env, 1)
        result = step_environment(env, "x")
        assert "cell is taken" in str(result.observation)
        assert not result.done
        env.close()


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (None, "closed the connection in step"),
        (failed("EXECUTION_ERROR", "out of order"), "failed in step: EXECUTION_ERROR: out of"),
        (failed("CAPACITY_REACHED", "full"), "agent.environment.num_workers"),
        ("no json", "no observation as openenv 0.10"),
        ("[]", "no observation as openenv 0.10"),
        ("[" * 100_000, "no observation as openenv 0.10"),
        (json.dumps({"type": "observation", "data": {"text": "old"}}), "no observation as"),
        (observed(done="yes"), "no observation as"),
        (observed(reward="much"), "no observation as"),
        ("x" * (17 * 2**20), "closed the connection in step"),
    ],
)
def test_a_connection_that_breaks_or_a_reply_that_is_none_crashes_the_episode(
    reply: str | None, words: str
) -> None:
    replies = {"reset": observed(), "step": reply}
    with openenv_like(play_by(replies)) as (url, messages):
        env = make_environment(f"openenv:{url}")
        reset_environment(env, 1)
        with pytest.raises((ConnectionError, RuntimeError), match=words):
            step_environment(env, "x")
        # The episode is not taken up on another connection.
        with pytest.raises((ConnectionError, RuntimeError)):
            step_environment(env, "x")
        # The next one has one of its own.
        reset_environment(env, 2)
        env.close()
    kinds = [message["type"] for message in messages if message["type"] != "close"]
    assert kinds == ["reset", "step", "reset"]


def test_a_message_that_nobody_asked_for_is_no_reply_to_the_next_request() -> None:
    replies = {"reset": observed("Guess."), "step": observed("Wrong.")}

    def answer(message: dict[str, Any]) -> list[str]:
        reply = replies.get(message["type"], "")
        return [reply, observed("Right.", 1, True)] if message["type"] == "reset" else [reply]

    with openenv_like(answer) as (url, _):
        env = make_environment(f"openenv:{url}")
        reset_environment(env, 1)
        time.sleep(0.2)
        assert step_environment(env, "x")[:3] == ("Wrong.", 0.0, False)
        env.close()


@pytest.mark.seconds
def test_a_server_that_hangs_ends_at_its_deadline() -> None:
    def answer(message: dict[str, Any]) -> str:
        if message["type"] == "step":
            time.sleep(3)
        return observed()

    with openenv_like(answer) as (url, _):
        env = make_environment(f"openenv:{url}", {"timeout_s": 0.3})
        reset_environment(env, 1)
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="did not answer step within"):
            step_environment(env, "x")
        assert time.monotonic() - begun < 2
        env.close()


def test_observations_are_worded_by_fields_and_by_the_template() -> None:
    data = {"observation": {"board": [1, 2], "turn": "x", "metadata": {}}}
    reply = json.dumps({"type": "observation", "data": data | {"reward": 0, "done": False}})
    with openenv_like(lambda _: reply) as (url, _):
        env = make_environment(f"openenv:{url}", {"prompt_template": "Play! {observation}"})
        assert reset_environment(env, 1) == "Play! board: [1, 2]\nturn: x"
        env.close()
        env = make_environment(f"openenv:{url}", {"fields": ["turn"]})
        assert str(reset_environment(env, 1)).startswith("x\n\n")
        env.close()
        env = make_environment(f"openenv:{url}", {"fields": ["score"]})
        with pytest.raises(ValueError, match="have no score; they have: board, turn"):
            reset_environment(env, 1)
        env.close()


@pytest.mark.parametrize(("schema", "status"), [(None, 200), ({"type": 7}, 200), (TEXT, 404)])
def test_another_protocol_is_refused_in_one_line(schema: Any, status: int) -> None:
    with (
        openenv_like(lambda _: observed(), schema, status) as (url, _),
        pytest.raises(ValueError, match=r"no server of openenv 0\.10") as error,
    ):
        make_environment(f"openenv:{url}")
    assert "\n" not in str(error.value)


def test_a_server_that_is_not_there_and_what_is_no_url_are_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        gone = f"http://127.0.0.1:{reserved.getsockname()[1]}"
    for url, words in ((gone, "cannot be reached"), ("ftp://x", "is no URL")):
        with pytest.raises(ValueError, match=words) as error:
            make_environment(f"openenv:{url}")
        assert "\n" not in str(error.value)
    with (
        pytest.raises(ValueError, match="it takes no size"),
        openenv_like(lambda _: observed()) as (url, _),
    ):
        make_environment(f"openenv:{url}", {"size": 3})


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with the package, which excludes vLLM's mcp: OPENENV_PYTHON, or made here."""
    if "OPENENV_PYTHON" in os.environ:
        return Path(os.environ["OPENENV_PYTHON"])
    folder = tmp_path_factory.mktemp("openenv")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "openenv>=0.10,<0.11"]
    if subprocess.run(install, check=False).returncode:
        pytest.skip("openenv cannot be installed")
    return python


@contextmanager
def real_server(python: Path, *words: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    command = [str(python), str(PROJECT / "tests/openenv_server.py"), str(port), *words]
    server = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        kill_tree(server.pid)
        server.wait()


@pytest.mark.slow
def test_a_server_of_the_package_is_played(interpreter: Path) -> None:
    with real_server(interpreter) as url:
        first, second = (make_environment(f"openenv:{url}") for _ in range(2))
        number = random.Random(3).randint(1, 3)
        for env in (first, second):
            observation = reset_environment(env, 3, task={"hint": " Try!"})
            assert observation == "Guess a number. Try!\n\nAnswer with the guess."
        wrong = step_environment(first, "seven")
        assert wrong[:3] == ("Wrong.", 0.0, False)
        assert step_environment(first, str(number))[:3] == ("Right.", 1.0, True)
        with pytest.raises(RuntimeError, match="out of order"):
            step_environment(second, "crash")
        others = [make_environment(f"openenv:{url}") for _ in range(9)]
        with pytest.raises(RuntimeError, match="num_workers"):
            for env in others:
                reset_environment(env, 1)
        for env in (first, second, *others):
            env.close()
    with real_server(interpreter, "moves") as url:
        env = make_environment(f"openenv:{url}")
        assert '"enum": ["left", "right"]' in str(reset_environment(env, 1))
        bad = step_environment(env, '{"direction": "up", "steps": 1}')
        assert bad.info == {"valid": False}
        done = step_environment(env, '{"direction": "right", "steps": 3}')
        assert done[:3] == ("You are at 3.", 1.0, True)
        env.close()
