"""Models beside the policy: answers, faults of servers, limits, caches and counts."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from custom.model_usage import USAGE
from features.judges import (
    Model,
    ModelError,
    ModelSettings,
    ModelTimeout,
    install_models,
    installed_models,
    models,
)
from tests import model_server as servers
from tests.conftest import PROJECT
from tests.model_server import completion, model_server, reply, say


@pytest.fixture(autouse=True)
def nothing_is_counted_yet() -> Iterator[None]:
    USAGE.take()
    yield
    install_models({})
    USAGE.take()


def model_at(url: str, **settings: Any) -> Model:
    arguments = {"name": "judge", "model": "m", "timeout_s": 5.0} | settings
    return Model(ModelSettings(base_url=url, **arguments))


def test_a_text_is_asked_as_one_user_message_at_temperature_0() -> None:
    with model_server(say("no")) as server:
        assert model_at(server.url).ask("Is 91 prime?", max_tokens=3, stop=["."]) == "no"
    assert server.bodies == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Is 91 prime?"}],
            "temperature": 0.0,
            "max_tokens": 3,
            "stop": ["."],
        }
    ]


def test_messages_and_the_settings_body_are_sent_as_they_are() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with model_server(say("")) as server:
        model = model_at(server.url, body={"temperature": 0.7, "top_p": 0.9})
        assert model.ask(messages) == ""
        model.ask("again", temperature=0.2)
    first, second = server.bodies
    assert first["messages"] == messages
    assert (first["temperature"], first["top_p"]) == (0.7, 0.9)
    assert (second["temperature"], second["top_p"]) == (0.2, 0.9)


@pytest.mark.parametrize("status", [500, 502, 503, 529, 408, 425])
def test_what_may_pass_is_tried_again(status: int) -> None:
    def answer(handler: Any, number: int) -> None:
        if number == 0:
            reply(handler, status, b"later", Retry_After="0")
        else:
            reply(handler, content=completion("yes"))

    with model_server(answer) as server:
        assert model_at(server.url).ask("?") == "yes"
    assert USAGE.take()["judge"]["retries"] == 1


@pytest.mark.seconds
@pytest.mark.parametrize("form", ["seconds", "date"])
def test_a_busy_server_is_left_alone_for_as_long_as_it_says(form: str) -> None:
    times: list[float] = []

    def answer(handler: Any, number: int) -> None:
        times.append(time.monotonic())
        # A date has whole seconds.
        wait = "1" if form == "seconds" else formatdate(time.time() + 2, usegmt=True)
        if number == 0:
            reply(handler, 429, b"slow down", Retry_After=wait)
        else:
            reply(handler, content=completion("yes"))

    with model_server(answer) as server:
        assert model_at(server.url).ask("?") == "yes"
    assert times[1] - times[0] >= 0.9


def test_a_server_that_wants_to_be_left_alone_beyond_the_deadline_is_an_error_at_once() -> None:
    with model_server(lambda handler, _: reply(handler, 429, Retry_After="3600")) as server:
        begun = time.monotonic()
        with pytest.raises(ModelError) as error:
            model_at(server.url).ask("?")
    assert error.value.kind == "busy"
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (servers.close_early, "unreachable"),
        (servers.cut, "unreachable"),
        (servers.garbage, "unreachable"),
        (servers.flood, "bad_answer"),
        (servers.bomb, "bad_answer"),
        (lambda handler, _: reply(handler, 500, b"oops"), "server_error"),
        (lambda handler, _: reply(handler, 401, b"who are you"), "refused"),
        (lambda handler, _: reply(handler, 404, b"no such model"), "refused"),
        (lambda handler, _: reply(handler, 302, Location="http://x/"), "refused"),
        (lambda handler, _: reply(handler, content=b"<html>"), "bad_answer"),
        (lambda handler, _: reply(handler, content=b"[" * 100_000), "bad_answer"),
        (lambda handler, _: reply(handler, content=b"[]"), "bad_answer"),
        (lambda handler, _: reply(handler, content=b"{}"), "bad_answer"),
        (lambda handler, _: reply(handler, content=b'{"choices": []}'), "bad_answer"),
        (lambda handler, _: reply(handler, content=b'{"choices": [7]}'), "bad_answer"),
        (lambda handler, _: reply(handler, content=completion(None)), "bad_answer"),
        (lambda handler, _: reply(handler, content=completion([1])), "bad_answer"),
    ],
)
def test_whatever_a_server_does_is_a_model_error_with_its_kind(fault: Any, kind: str) -> None:
    with model_server(fault) as server:
        with pytest.raises(ModelError) as error:
            model_at(server.url, max_retries=1).ask("?")
        assert error.value.kind == kind
        assert f"model judge (m at {server.url})" in str(error.value)
    assert USAGE.take()["judge"]["failures"] == 1
    assert len(str(error.value)) < 600


@pytest.mark.seconds
@pytest.mark.parametrize("fault", [servers.hang, servers.trickle])
def test_a_server_that_hangs_or_trickles_ends_at_the_deadline(fault: Any) -> None:
    with model_server(fault) as server:
        begun = time.monotonic()
        with pytest.raises(ModelTimeout) as error:
            model_at(server.url, timeout_s=0.5).ask("?")
    assert error.value.kind == "timeout"
    # Tools count it as a timeout.
    assert isinstance(error.value, TimeoutError)
    assert time.monotonic() - begun < 3


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(ModelError) as error:
        model_at(f"http://127.0.0.1:{port}/v1", max_retries=1).ask("?")
    assert error.value.kind == "unreachable"
    assert "in 2 tries" in str(error.value)


def test_usage_that_is_no_number_counts_nothing() -> None:
    odd = completion("yes", usage={"prompt_tokens": "many", "completion_tokens": -5})
    with model_server(lambda handler, _: reply(handler, content=odd)) as server:
        assert model_at(server.url).ask("?") == "yes"
    counts = USAGE.take()["judge"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (0, 0)


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")

    def echo(handler: Any, number: int) -> None:
        reply(handler, 401, b"wrong key sk-very-secret")

    with model_server(echo) as server:
        model = model_at(server.url, key_env="JUDGE_KEY")
        with pytest.raises(ModelError) as error:
            model.ask("?")
        assert server.keys == ["Bearer sk-very-secret"]
    assert "sk-very" not in str(error.value)
    assert "***" in str(error.value)
    assert "sk-very" not in repr(model.settings)


@pytest.mark.parametrize("value", [None, "", "two\nlines", "schlüssel"])
def test_a_key_that_cannot_be_one_says_so_without_asking(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with model_server(say("yes")) as server:
        with pytest.raises(ModelError, match="environment variable JUDGE_KEY") as error:
            model_at(server.url, key_env="JUDGE_KEY").ask("?")
        assert server.bodies == []
    assert error.value.kind == "not_set_up"


def test_equal_questions_at_temperature_0_are_asked_once() -> None:
    with model_server(say("yes")) as server:
        model = model_at(server.url)
        assert [model.ask("a"), model.ask("a"), model.ask("a", max_tokens=1)] == ["yes"] * 3
        assert len(server.bodies) == 2
        model.ask("a", temperature=1.0)
        model.ask("a", temperature=1.0)
        assert len(server.bodies) == 4
        model.ask("a", temperature=1.0, cache=True)
        model.ask("a", temperature=1.0, cache=True)
        assert len(server.bodies) == 5
        model.ask("a", cache=False)
        assert len(server.bodies) == 6
    counts = USAGE.take()["judge"]
    assert (counts["calls"], counts["cached"]) == (6, 2)


def test_a_whole_answer_is_kept_apart_from_its_text() -> None:
    with model_server(say("yes")) as server:
        model = model_at(server.url)
        body = {"messages": [{"role": "user", "content": "?"}], "model": "other"}
        wholes = [asyncio.run(model.complete_async(body)) for _ in range(2)]
        assert model.ask("?") == "yes"
    assert wholes[0] == wholes[1] == json.loads(completion("yes"))
    assert [sent["model"] for sent in server.bodies] == ["m", "m"]
    assert USAGE.take()["judge"]["cached"] == 1


def test_failures_are_not_kept() -> None:
    def answer(handler: Any, number: int) -> None:
        reply(handler, content=completion(None if number == 0 else "yes"))

    with model_server(answer) as server:
        model = model_at(server.url)
        with pytest.raises(ModelError):
            model.ask("?")
        assert model.ask("?") == "yes"


def test_answers_on_disk_outlive_the_process_and_damaged_files_are_asked_again(
    tmp_path: Path,
) -> None:
    with model_server(say("yes")) as server:
        for _ in range(2):
            model = model_at(server.url, cache="disk", folder=str(tmp_path))
            assert model.ask("a") == "yes"
        assert len(server.bodies) == 1
        (file,) = tmp_path.rglob("*.json")
        file.write_bytes(b"\xff{")
        assert model_at(server.url, cache="disk", folder=str(tmp_path)).ask("a") == "yes"
        assert len(server.bodies) == 2
        assert json.loads(file.read_text()) == "yes"


def test_a_folder_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with model_server(say("yes")) as server:
        model = model_at(server.url, cache="disk", folder=str(blocked))
        assert [model.ask("a"), model.ask("b")] == ["yes", "yes"]


def slowly(handler: Any, number: int) -> None:
    time.sleep(0.15)
    reply(handler, content=completion(f"answer {number}"))


@pytest.mark.seconds
def test_many_questions_run_side_by_side_up_to_the_limit() -> None:
    with model_server(slowly) as server:
        model = model_at(server.url, max_concurrency=4)
        begun = time.monotonic()
        answers = model.ask_all([f"question {i}" for i in range(12)])
        assert time.monotonic() - begun < 1.5
        assert len(set(answers)) == 12
        assert server.most_at_once == 4


def test_answers_of_ask_all_come_in_order_and_the_first_error_is_raised_at_the_end() -> None:
    def echo(handler: Any, number: int) -> None:
        text = server.bodies[number]["messages"][0]["content"]
        if text == "bad":
            reply(handler, 400, b"no")
            return
        time.sleep(0.2 if text == "0" else 0.0)
        reply(handler, content=completion(text))

    with model_server(echo) as server:
        model = model_at(server.url)
        assert model.ask_all(["0", "1", "2"]) == ["0", "1", "2"]
        with pytest.raises(ModelError, match="400"):
            model.ask_all(["3", "bad", "4"])
        assert len(server.bodies) == 6


@pytest.mark.seconds
def test_a_turn_that_has_to_be_waited_for_does_not_count_for_the_deadline() -> None:
    with model_server(slowly) as server:
        model = model_at(server.url, max_concurrency=1, timeout_s=0.5)
        assert len(model.ask_all([str(i) for i in range(8)])) == 8


ASKER = """
import sys
from features.judges import Model, ModelSettings
settings = ModelSettings(
    name="judge", base_url=sys.argv[1], model="m", max_concurrency=3, folder=sys.argv[2]
)
Model(settings).ask_all([f"{sys.argv[3]} {i}" for i in range(8)])
"""


@pytest.mark.seconds
def test_the_limit_holds_over_processes_and_an_ended_one_gives_its_turns_back(
    tmp_path: Path,
) -> None:
    with model_server(servers.hang) as server:
        command = [sys.executable, "-c", ASKER, server.url, str(tmp_path)]
        hung = subprocess.Popen([*command, "hung"], cwd=PROJECT)
        while len(server.bodies) < 3:
            time.sleep(0.02)
        hung.kill()
        hung.wait()
        server.most_at_once = server.at_once = 0
        server.answer = slowly
        askers = [subprocess.Popen([*command, str(number)], cwd=PROJECT) for number in range(3)]
        assert [asker.wait(60) for asker in askers] == [0, 0, 0]
        assert server.most_at_once == 3
        assert len(server.bodies) == 3 + 24


def test_it_can_be_awaited_in_any_loop_while_others_run() -> None:
    with model_server(slowly) as server:
        model = model_at(server.url)

        async def ask() -> tuple[list[str], int]:
            ticks = 0
            asked = asyncio.gather(*(model.ask_async(str(i)) for i in range(3)))
            while not asked.done():
                await asyncio.sleep(0.01)
                ticks += 1
            return await asked, ticks

        for _ in range(2):
            answers, ticks = asyncio.run(ask())
            assert len(answers) == 3
        assert ticks >= 0


@pytest.mark.seconds
def test_a_caller_that_gives_up_hangs_up() -> None:
    with model_server(servers.trickle) as server:
        model = model_at(server.url, timeout_s=60.0)

        async def give_up() -> None:
            async with asyncio.timeout(0.3):
                await model.ask_async("?")

        with pytest.raises(TimeoutError):
            asyncio.run(give_up())
        deadline = time.monotonic() + 5
        while server.at_once and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.at_once == 0


def test_a_fork_asks_with_connections_of_its_own() -> None:
    with model_server(say("yes")) as server:
        model = model_at(server.url, cache="never")
        model.ask("parent")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if model.ask("child") == "yes" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_costs_follow_the_prices() -> None:
    with model_server(say("yes")) as server:
        model_at(server.url, price_in=2.0, price_out=8.0).ask("?")
    counts = USAGE.take()["judge"]
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (10, 5)
    assert counts["cost"] == pytest.approx((10 * 2.0 + 5 * 8.0) / 1e6)
    assert counts["seconds"] > 0
    assert USAGE.take() == {}


def test_models_are_taken_by_name_before_and_after_they_are_installed() -> None:
    judge = models["judge"]
    with model_server(say("yes")) as server:
        model = model_at(server.url)
        install_models({"judge": model.settings})
        assert judge.ask("?") == "yes"
        assert list(models) == ["judge"]
        words = r"judges\.models has no 'jugde'; it has: judge\. Did you mean 'judge'\?"
        with pytest.raises(ModelError, match=words):
            models["jugde"]
        # The same settings again keep the cache.
        install_models(installed_models())
        judge.ask("?")
        assert len(server.bodies) == 1
    install_models({})
    with pytest.raises(ModelError, match="it has: none") as error:
        judge.ask("?")
    assert error.value.kind == "not_set_up"


def test_errors_travel_between_processes() -> None:
    for error in (ModelError("why", "busy"), ModelTimeout("late", "timeout")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.kind) == (type(error), str(error), error.kind)


def test_threads_ask_at_the_same_time() -> None:
    answers: list[str] = []
    with model_server(slowly) as server:
        model = model_at(server.url)
        threads = [
            threading.Thread(target=lambda i=i: answers.append(model.ask(str(i)))) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(answers)) == 8
    assert USAGE.take()["judge"]["calls"] == 8
