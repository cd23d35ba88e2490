"""Programs and their reward functions ask the models beside the policy; all of it is counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from custom.model_usage import USAGE, Counts, add_counts
from custom.side_services import SideService
from features.judges import ModelSettings, install_models
from features.judges.registry import service_of
from features.programs.attempt import Deadlines
from features.programs.exchange import Asked
from features.programs.pool import ProgramPool
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import exit_of, play
from tests.features.programs.test_server import Served, begin
from tests.model_server import completion, hang, model_server, reply, say
from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply

FILE = Path(__file__).with_name("asks_judge.py")


@pytest.fixture(autouse=True)
def no_models_stay() -> Iterator[None]:
    USAGE.take()
    yield
    install_models({})
    USAGE.take()


def judge_at(url: str, **settings: Any) -> tuple[SideService, ...]:
    judge = ModelSettings(name="judge", base_url=url, model="m", **({"max_retries": 0} | settings))
    return (service_of({"judge": judge}),)


def pool_of(spec: ProgramSpec, isolation: Any = "thread", **deadlines: Any) -> ProgramPool:
    return ProgramPool(
        {0: spec},
        deadlines=Deadlines(**deadlines),
        max_tokens=4096,
        homes=partial(EnvironmentPool, isolation=isolation),
    )


def counts_of(told: list[Any]) -> dict[str, float]:
    """What an episode's replies say of the judge."""
    counts: Counts = {}
    for heard in told:
        if isinstance(heard, StepReply):
            add_counts(counts, heard.usage)
    return counts.get("judge", {})


@pytest.mark.seconds
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_function_asks_models_by_name_wherever_it_lives(isolation: str) -> None:
    with model_server(say("0.5")) as server:
        spec = ProgramSpec(function=f"{FILE}:solve", services=judge_at(server.url))
        with pool_of(spec, isolation) as pool:
            told = play(pool)
    assert exit_of(told).reward == 1.0, exit_of(told).error
    counts = counts_of(told)
    assert (counts["calls"], counts["prompt_tokens"]) == (2, 20)
    assert [body["temperature"] for body in server.bodies] == [0.0, 1.0]
    assert USAGE.take() == {}, "nothing is left for another episode"


@pytest.mark.seconds
def test_a_command_asks_a_model_through_the_policys_own_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "secret-1")
    with model_server(say("0.5")) as server:
        models = judge_at(server.url, key_env="JUDGES_KEY")
        spec = ProgramSpec(command=(sys.executable, str(FILE)), services=models)
        with pool_of(spec) as pool:
            first = play(pool, key=0)
            second = play(pool, key=1)
    for told in (first, second):
        assert exit_of(told).reward == 0.5, exit_of(told).error
        assert len([heard for heard in told if isinstance(heard, Asked)]) == 1, "of the policy"
    assert counts_of(first)["calls"] == 1
    assert counts_of(second) == {"cached": 1.0}
    [body] = server.bodies
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    assert server.keys == ["Bearer secret-1"]


def test_a_reward_function_asks_models_and_its_judges_silence_fails_the_episode_alone() -> None:
    def twice(handler: Any, number: int) -> None:
        reply(handler, 200 if number == 0 else 500, completion("0.25"))

    with model_server(twice) as server:
        spec = ProgramSpec(
            command=(sys.executable, str(FILE.with_name("faulty.py")), "well"),
            reward_path=str(FILE),
            reward_name="judged",
            services=judge_at(server.url, cache="never"),
        )
        with pool_of(spec) as pool:
            paid = play(pool, key=0)
            failed = play(pool, key=1)
    assert paid[-1].reward == 0.25 and counts_of(paid)["calls"] == 1
    assert failed[-1].failure == "env_crash" and "ModelError: model judge" in failed[-1].error
    assert counts_of(failed)["failures"] == 1


@pytest.mark.seconds
def test_an_sdk_is_told_why_a_model_gave_no_answer_and_does_not_ask_again() -> None:
    def down(handler: Any, number: int) -> None:
        reply(handler, 503, b"away")

    with model_server(down) as server:
        spec = ProgramSpec(command=(sys.executable, str(FILE)), services=judge_at(server.url))
        with pool_of(spec) as pool:
            told = play(pool)
    assert exit_of(told).reward == -424
    assert exit_of(told).metrics == {"server_error": 1.0}
    assert len(server.bodies) == 1, "the run's own retries are enough"
    assert counts_of(told)["failures"] == 1


@pytest.mark.seconds
@pytest.mark.parametrize("way", ["command", "function"])
def test_a_judge_that_hangs_ends_its_program_at_the_programs_deadline(way: str) -> None:
    with model_server(hang) as server:
        models = judge_at(server.url)
        spec = ProgramSpec(command=(sys.executable, str(FILE)), services=models)
        if way == "function":
            spec = ProgramSpec(function=f"{FILE}:asks_and_hangs", services=models)
        with pool_of(spec, step_s=4.0) as pool:
            exited = exit_of(play(pool))
            assert exited.failure == "env_timeout", exited.error
        assert len(server.bodies) == 1
    USAGE.take()


@pytest.mark.seconds
def test_what_a_function_that_was_given_up_had_asked_is_counted_once() -> None:
    with model_server(say("0.5")) as server:
        spec = ProgramSpec(function=f"{FILE}:asks_and_hangs", services=judge_at(server.url))
        with pool_of(spec, step_s=1.0) as pool:
            told = play(pool)
    assert exit_of(told).failure == "env_timeout"
    # With the episode, or with whoever of this process ends next.
    later = USAGE.take().get("judge", {})
    assert counts_of(told).get("calls", 0) + later.get("calls", 0) == 1


def test_a_machines_proxy_is_not_asked_for_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody listens there.
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    spec = ProgramSpec(function=f"{FILE.parent}/runs/programs/solve.py:branch")
    with pool_of(spec) as pool:
        exited = exit_of(play(pool))
    assert exited.failure == "", exited.error


ASKED = {"model": "judge", "messages": [{"role": "user", "content": "?"}]}


@pytest.fixture
def judged() -> Iterator[tuple[Served, Any]]:
    """A program that sleeps, for which the test asks a judge, and the judge's server."""
    with model_server(say("yes")) as server:
        spec = ProgramSpec(
            command=(sys.executable, "-c", "import time; time.sleep(60)"),
            services=judge_at(server.url),
        )
        with pool_of(spec) as pool:
            yield begin(pool), server


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/chat/completions", {"stream": True}, "stream is not served for model='judge'"),
        ("/v1/responses", {"input": "?"}, "answers /v1/chat/completions alone"),
        ("/v1/messages", {"max_tokens": 5}, '"type": "error"'),
    ],
)
def test_what_a_model_beside_the_policy_does_not_serve_is_refused(
    judged: tuple[Served, Any], path: str, body: dict[str, Any], words: str
) -> None:
    served, server = judged
    response = served.send(json.dumps(ASKED | body).encode(), path).getresponse()
    assert response.status == 400 and words in response.read().decode()
    assert server.bodies == [] and served.heard(Asked, 0.1) is None


def test_fields_that_the_policy_does_not_serve_reach_a_model_beside_it(
    judged: tuple[Served, Any],
) -> None:
    served, server = judged
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    more = {
        "messages": [{"role": "user", "content": [picture]}],
        "response_format": {"type": "json_object"},
        "stream": False,
        "stream_options": {"include_usage": True},
    }
    response = served.send(json.dumps(ASKED | more).encode()).getresponse()
    answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] == "yes"
    assert answer["usage"]["prompt_tokens"] == 10
    [body] = server.bodies
    assert body["messages"] == more["messages"] and not body.keys() & {"stream", "stream_options"}
    assert body["response_format"] == {"type": "json_object"}


@pytest.mark.parametrize("name", [["judge"], {"judge": 1}, None, 3, "judge ", "JUDGE"])
def test_any_other_name_is_the_policys(judged: tuple[Served, Any], name: Any) -> None:
    served, server = judged
    connection = served.send(json.dumps(ASKED | {"model": name}).encode())
    served.answer(served.heard(Asked))
    assert json.load(connection.getresponse())["choices"][0]["message"]["content"] == "Yes."
    assert server.bodies == []


def test_the_list_of_models_names_those_beside_the_policy(judged: tuple[Served, Any]) -> None:
    served, _ = judged
    connection = served.send()
    served.answer(served.heard(Asked))
    connection.getresponse().read()
    connection.request("GET", f"{served.base}/v1/models")
    listed = json.load(connection.getresponse())["data"]
    assert [entry["id"] for entry in listed] == ["policy", "judge"]


def test_nobody_asks_a_model_by_the_token_of_an_episode_that_has_ended(
    judged: tuple[Served, Any],
) -> None:
    served, server = judged
    served.pool._call(served.pool._attempts[0].end_requests)
    assert served.send(json.dumps(ASKED).encode()).getresponse().status == 410
    unknown = Served(served.pool, "/e/" + "x" * 32, served.port)
    assert unknown.send(json.dumps(ASKED).encode()).getresponse().status == 401
    assert server.bodies == []
