"""What becomes of a program behind a limit of its episode: it is judged, and ended in time."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from features.programs.attempt import Deadlines
from features.programs.exchange import Answer, Asked, Exited, Refusal
from features.programs.pool import ProgramPool
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import YES
from workers.environments.reply import StepReply

JUDGE = """
def compute_score(task, output, conversations):
    return len(conversations) + float("WORK DONE" in output)
"""
ASKS = """
import json, os, sys, time, urllib.request
print("WORK DONE", flush=True)

def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()

ask("first")
"""
RETRIES = """
for _ in range(200):
    try:
        ask("further")
    except OSError:
        time.sleep(0.1)
"""
COMPACTS = """
for number in range(8):
    try:
        ask("x" * (100 - number))
    except OSError:
        time.sleep(0.1)
ask("short")
print(0.25)
"""


class Played:
    """Plays one episode whose requests behind the first are refused."""

    def __init__(
        self, script: Path, refusal: Refusal, *, judge: Path | None, grace_s: float, **more: Any
    ) -> None:
        spec = ProgramSpec(
            command=(sys.executable, str(script)),
            reward_path=None if judge is None else str(judge),
            reward_name="compute_score",
            **more,
        )
        deadlines = Deadlines(step_s=20.0, grace_s=grace_s)
        began = time.monotonic()
        self.requests = 0
        with ProgramPool({0: spec}, deadlines=deadlines, max_tokens=4096) as pool:
            pool.reset(0, 0, 7, {})
            self.reply: StepReply | None = None
            while self.reply is None:
                for _, heard in pool.poll(1.0):
                    if isinstance(heard, Asked):
                        self.requests += 1
                        is_served = heard.messages[0]["content"] in ("first", "short")
                        refused = Answer(refusal=refusal, error="no")
                        pool.answer(0, heard.number, YES if is_served else refused)
                    elif isinstance(heard, Exited):
                        self.exited = heard
                        self.seconds = time.monotonic() - began
                        pool.finish(0, "max_turns")
                    else:
                        self.reply = heard
        assert self.reply is not None


@pytest.fixture
def judge(tmp_path: Path) -> Path:
    path = tmp_path / "judge.py"
    path.write_text(JUDGE)
    return path


def script(tmp_path: Path, rest: str) -> Path:
    path = tmp_path / "agent.py"
    path.write_text(ASKS + rest)
    return path


@pytest.mark.parametrize("refusal", ["ended", "context_length"])
@pytest.mark.parametrize("rest", ['ask("further")', "try: ask('further')\nexcept OSError: pass"])
def test_an_agent_that_ends_by_a_limit_is_judged_whatever_its_exit_code(
    tmp_path: Path, judge: Path, refusal: Refusal, rest: str
) -> None:
    played = Played(script(tmp_path, rest), refusal, judge=judge, grace_s=5.0)
    assert played.reply is not None and played.reply.reward == 2.0
    assert played.exited.record["exit_code"] == int("try" not in rest)


@pytest.mark.parametrize("rest", ["sys.exit(3)", "raise RuntimeError('a bug of its own')"])
def test_an_agent_that_fails_by_itself_is_not_judged(
    tmp_path: Path, judge: Path, rest: str
) -> None:
    played = Played(script(tmp_path, rest), "ended", judge=judge, grace_s=5.0)
    assert played.exited.failure == "env_crash"
    assert played.reply is not None and played.reply.reward is None


@pytest.mark.seconds
@pytest.mark.parametrize("refusal", ["ended", "context_length"])
@pytest.mark.parametrize("is_judged", [True, False])
def test_one_that_tries_again_and_again_is_ended_behind_its_grace(
    tmp_path: Path, judge: Path, refusal: Refusal, is_judged: bool
) -> None:
    path = script(tmp_path, RETRIES)
    played = Played(path, refusal, judge=judge if is_judged else None, grace_s=0.5)
    assert played.exited.record["exit_code"] == -9 and played.seconds < 10
    assert 2 < played.requests < 30
    assert played.reply is not None and played.reply.reward == (2.0 if is_judged else None)


@pytest.mark.seconds
@pytest.mark.parametrize("is_judged", [True, False])
@pytest.mark.parametrize("rest", ["time.sleep(60)", "[print(0.75, flush=True), time.sleep(60)]"])
def test_one_that_asks_nothing_more_behind_a_limit_is_ended_all_the_same(
    tmp_path: Path, judge: Path, is_judged: bool, rest: str
) -> None:
    path = script(tmp_path, f"try: ask('further')\nexcept OSError: {rest}")
    played = Played(path, "ended", judge=judge if is_judged else None, grace_s=0.5)
    assert played.seconds < 10 and played.exited.record["exit_code"] == -9
    assert played.reply is not None and played.reply.reward == (2.0 if is_judged else None)
    assert played.exited.reward == (0.75 if "print" in rest and not is_judged else None)


@pytest.mark.seconds
def test_one_that_pays_itself_has_its_grace_to_say_so(tmp_path: Path) -> None:
    rest = "try: ask('further')\nexcept OSError: time.sleep(0.5)\nprint(0.75)"
    played = Played(script(tmp_path, rest), "ended", judge=None, grace_s=5.0)
    assert (played.exited.reward, played.exited.failure) == (0.75, "")


@pytest.mark.seconds
def test_one_that_compacts_goes_on(tmp_path: Path) -> None:
    played = Played(script(tmp_path, COMPACTS), "context_length", judge=None, grace_s=0.3)
    assert (played.exited.reward, played.exited.failure, played.requests) == (0.25, "", 10)


def test_a_function_that_ends_by_a_limit_is_judged(tmp_path: Path, judge: Path) -> None:
    path = tmp_path / "game.py"
    path.write_text(
        "async def solve(task, client):\n"
        "    for text in ('first', 'further'):\n"
        "        messages = [{'role': 'user', 'content': text}]\n"
        "        await client.chat.completions.create(model='m', messages=messages)\n"
    )
    spec = ProgramSpec(
        function=f"{path}:solve", reward_path=str(judge), reward_name="compute_score"
    )
    with ProgramPool({0: spec}, deadlines=Deadlines(step_s=20.0), max_tokens=4096) as pool:
        pool.reset(0, 0, 7, {})
        reply = None
        while reply is None:
            for _, heard in pool.poll(1.0):
                if isinstance(heard, Asked):
                    is_first = heard.number == 1
                    refused = Answer(refusal="ended", error="no")
                    pool.answer(0, heard.number, YES if is_first else refused)
                elif isinstance(heard, Exited):
                    assert heard.failure == "env_crash"
                    pool.finish(0, "max_turns")
                else:
                    reply = heard
    assert reply.reward == 1.0
