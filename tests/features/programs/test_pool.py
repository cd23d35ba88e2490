"""The pool of programs with real processes: how they end, what they may take, what is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from features.programs.attempt import Deadlines
from features.programs.exchange import Answer, Asked, Exited, Rewarded
from features.programs.pool import ProgramPool
from features.programs.spec import ProgramSpec
from workers.environments.reply import StepReply

FAULTY = str(Path(__file__).with_name("faulty.py"))
YES = Answer(text="Yes.", token_ids=(1,), log_probs=(-0.5,), prompt_tokens=2)


def program(way: str, **more: Any) -> ProgramSpec:
    return ProgramSpec(command=(sys.executable, FAULTY, way), **({"memory_gb": 2.0} | more))


def pool_of(*specs: ProgramSpec, step_s: float | None = 60.0) -> ProgramPool:
    deadlines = Deadlines(step_s=step_s)
    return ProgramPool(dict(enumerate(specs)), deadlines=deadlines, max_tokens=4096)


def play(pool: ProgramPool, key: int = 0, spec: int = 0, task: Any = None) -> list[Any]:
    """Starts a program and answers it until it has ended; returns what was told."""
    pool.reset(key, spec, 7, task)
    told: list[Any] = []
    until = time.monotonic() + 60
    while not isinstance(told[-1] if told else None, StepReply):
        assert time.monotonic() < until, told
        for heard_key, heard in pool.poll(1.0):
            assert heard_key == key
            told.append(heard)
            if isinstance(heard, Asked):
                pool.answer(key, heard.number, YES)
            if isinstance(heard, Exited):
                pool.finish(key, "done")
    return told


def exit_of(told: list[Any]) -> Exited:
    [exited] = [heard for heard in told if isinstance(heard, Exited)]
    return exited


def descendants() -> list[str]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found.append(" ".join(child.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Asserts that no process of a test's programs lives on after it."""
    yield
    until = time.monotonic() + 5
    left = ["?"]
    while left and time.monotonic() < until:
        words = ("faulty", "fork_server_process")
        left = [command for command in descendants() if any(word in command for word in words)]
        time.sleep(0.05)
    assert not left


pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_program_gets_its_task_and_its_answers_and_is_paid_by_its_last_line() -> None:
    with pool_of(program("well")) as pool:
        told = play(pool, task={"pays": 0.75})
    exited = exit_of(told)
    assert (exited.failure, exited.reward, exited.error) == ("", 0.75, "")
    assert exited.record["exit_code"] == 0 and "some words before" in exited.record["output"]
    assert [heard.messages for heard in told if isinstance(heard, Asked)] == [
        [{"role": "user", "content": "Hello"}]
    ]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("way", "failure", "reward", "error"),
    [
        ("raises", "env_crash", None, "exit code 1.*\n.*RuntimeError: no more of this"),
        ("kills_itself", "env_crash", None, "signal 11"),
        ("hangs", "env_timeout", None, "still working at its deadline"),
        ("ignores_signals", "env_timeout", None, "still working at its deadline"),
        ("floods", "", 0.5, ""),
        ("leaves_children", "", 1.0, ""),
        ("kills_its_launcher", "env_crash", None, "signal 9"),
        ("stops_its_launcher", "env_timeout", None, "still working at its deadline"),
        ("looks_for_files", "", 3.0, ""),
        ("forks_that_ask", "", 1.0, ""),
        ("closes_early", "", 1.0, ""),
        ("sends_garbage", "", 1.0, ""),
        ("sends_much", "", 1.0, ""),
        ("says_no_reward", "env_crash", None, "no reward: 'I did well'"),
        ("asks_for_nothing", "", 1.0, ""),
        ("takes_memory", "env_crash", None, "MemoryError"),
        ("opens_files", "env_crash", None, "Too many open files"),
        ("guesses_tokens", "", 1.0, ""),
        ("exits_with_3", "env_crash", None, "exit code 3"),
    ],
)
def test_a_faulty_program_ends_as_what_it_is_and_leaves_nothing(
    way: str, failure: str, reward: float | None, error: str
) -> None:
    with pool_of(program(way), program("well"), step_s=2.0) as pool:
        exited = exit_of(play(pool))
        assert (exited.failure, exited.reward) == (failure, reward), exited.error
        assert re.search(error, exited.error, re.DOTALL), exited.error
        left = [command for command in descendants() if "faulty" in command]
        assert not left, "what a program started ends with it"
        assert len(exited.record["errors"]) <= 20_000
        assert exit_of(play(pool, key=1, spec=1)).reward == 1.0, "others play on"


def test_what_a_program_started_ends_though_it_killed_its_launcher() -> None:
    """Nobody of this process's adopts it then."""
    with pool_of(program("kills_its_launcher"), step_s=2.0) as pool:
        assert exit_of(play(pool)).failure == "env_crash"
        until = time.monotonic() + 5
        left = orphans("left-without-launcher")
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = orphans("left-without-launcher")
        assert not left


def orphans(word: str) -> list[psutil.Process]:
    """Lists processes of this machine with a word of their command, but ended ones."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if word in (process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_a_process_of_a_program_that_still_runs_is_left_alone() -> None:
    """Its own double fork is adopted by the launcher, while another program ends."""
    with pool_of(program("leaves_children"), program("well"), program("hangs")) as pool:
        pool.reset(5, 2, 0)
        heard: list[Any] = []
        while not heard:
            heard = pool.poll(1.0)
        assert exit_of(play(pool, key=1, spec=1)).reward == 1.0
        assert any("hangs" in command for command in descendants())


def test_an_exit_code_pays_where_it_is_asked_to() -> None:
    specs = [program("exits_with_3", reward="exit_code"), program("well", reward="exit_code")]
    with pool_of(*specs, program("kills_itself", reward="exit_code")) as pool:
        assert exit_of(play(pool, 0, 0)).reward == 0.0
        assert exit_of(play(pool, 1, 1)).reward == 1.0
        assert exit_of(play(pool, 2, 2)).failure == "env_crash"


def test_rewards_of_turns_are_told_and_no_last_line_is_needed_then() -> None:
    with pool_of(program("pays_turns")) as pool:
        told = play(pool)
    exited = exit_of(told)
    assert (exited.failure, exited.reward) == ("", None), exited.error
    assert [heard.reward for heard in told if isinstance(heard, Rewarded)] == [0.25]
    assert [heard.reward for heard in told if isinstance(heard, Asked)] == [None, 0.5]


def test_programs_are_forked_from_what_was_preloaded_and_each_draws_for_itself(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, random\n"
        "assert not any(path.endswith('features/programs') for path in sys.path)\n"
        "assert 'decimal' in sys.modules and sys.argv[1:] == ['word'] and __name__ == '__main__'\n"
        "print(random.random())\n"
    )
    spec = ProgramSpec(command=(sys.executable, str(script), "word"), preload=("decimal",))
    with pool_of(spec) as pool:
        rewards = [exit_of(play(pool, key)).reward for key in range(3)]
    assert len(set(rewards)) == 3 and None not in rewards


@pytest.mark.seconds
@pytest.mark.parametrize("preload", [(), ("decimal",)])
def test_a_program_ends_as_its_interpreter_would_end_it(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    """With the threads that it has not joined, what it registered, and its exit code."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys, threading, time\n"
        "def later():\n"
        "    time.sleep(0.2)\n"
        "    print('joined')\n"
        "threading.Thread(target=later).start()\n"
        "atexit.register(lambda: print(0.25))\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    words = (sys.executable, str(script))
    codes = ("256", "-1", str(2**40 + 3))
    specs = [ProgramSpec(command=(*words, code), preload=preload) for code in codes]
    with pool_of(*specs) as pool:
        exited = exit_of(play(pool))
        assert (exited.reward, exited.record["output"]) == (0.25, "joined\n0.25\n"), exited.error
        assert exit_of(play(pool, key=1, spec=1)).record["exit_code"] == 255
        assert exit_of(play(pool, key=2, spec=2)).record["exit_code"] == 3


@pytest.mark.seconds
def test_a_preloaded_sdk_has_made_its_first_request(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, threading, ssl\n"
        "before = set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
        "import openai\n"
        "with openai.OpenAI() as client, openai.OpenAI() as other:\n"
        "    message = {'role': 'user', 'content': 'Hello'}\n"
        "    for one in (client, other):\n"
        "        one.chat.completions.create(model='m', messages=[message])\n"
        "new = {name for name in set(sys.modules) - before if name.startswith('openai')}\n"
        "assert not new, new\n"
        "made = [ssl.create_default_context() for _ in range(3)]\n"
        "assert len({id(context) for context in made}) == 3\n"
        "assert ssl.create_default_context().verify_mode == ssl.CERT_REQUIRED\n"
        "print(1.0)\n"
    )
    spec = ProgramSpec(command=(sys.executable, str(script)), preload=("openai",))
    with pool_of(spec) as pool:
        told = play(pool)
    assert exit_of(told).reward == 1.0, exit_of(told).error
    assert sum(isinstance(heard, Asked) for heard in told) == 2


def test_calls_that_are_made_at_once_are_all_done_also_behind_one_that_fails(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print(0.5)\n")
    spec = ProgramSpec(command=(sys.executable, str(script)), preload=("decimal",))
    keys = set(range(12))
    with pool_of(spec) as pool:
        for key in keys:
            pool.reset(key, 0, 7)
            # Nobody asked for this answer.
            pool.answer(key, 99, YES)
        exited: set[int] = set()
        finished: set[int] = set()
        until = time.monotonic() + 60
        while finished != keys:
            assert time.monotonic() < until, (exited, finished)
            for key, heard in pool.poll(1.0):
                if isinstance(heard, Exited):
                    assert heard.reward == 0.5, heard.error
                    exited.add(key)
                    pool.finish(key, "done")
                if isinstance(heard, StepReply):
                    finished.add(key)
    assert exited == keys


def test_a_function_reaches_the_policy_whatever_proxy_the_machine_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "game.py").write_text(
        "async def solve(task, client, seed):\n"
        "    message = {'role': 'user', 'content': 'Hello'}\n"
        "    await client.chat.completions.create(model='m', messages=[message])\n"
        "    return 0.25\n"
    )
    with pool_of(ProgramSpec(function=f"{tmp_path / 'game.py'}:solve")) as pool:
        told = play(pool)
    assert exit_of(told).reward == 0.25, exit_of(told).error


def test_a_command_that_does_not_start_is_a_crash() -> None:
    with pool_of(ProgramSpec(command=("/nowhere/at-all",))) as pool:
        exited = exit_of(play(pool))
    assert exited.failure == "env_crash" and "nowhere" in exited.error


@pytest.mark.seconds
def test_a_program_that_asks_whatever_it_hears_meets_its_deadline() -> None:
    no = Answer(refusal="ended", error="the episode has had its turns")
    with pool_of(program("asks_whatever_it_hears"), step_s=1.0) as pool:
        pool.reset(0, 0, 7)
        refused = 0
        until = time.monotonic() + 20
        exited = None
        while exited is None:
            assert time.monotonic() < until, refused
            for _, heard in pool.poll(1.0):
                if isinstance(heard, Asked):
                    pool.answer(0, heard.number, no if heard.number > 2 else YES)
                    refused += heard.number > 2
                if isinstance(heard, Exited):
                    exited = heard
    assert exited.failure == "env_timeout" and refused > 1


def test_a_preloaded_module_that_ends_its_interpreter_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends_at_once.py").write_text("raise SystemExit(3)\n")
    variables = (("PYTHONPATH", str(tmp_path)),)
    script = (sys.executable, FAULTY, "well")
    spec = ProgramSpec(command=script, preload=("ends_at_once",), variables=variables)
    with pool_of(spec) as pool:
        error = exit_of(play(pool)).error
    assert "cannot import ends_at_once (SystemExit(3))" in error


@pytest.mark.seconds
def test_nothing_lives_on_when_the_trainer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "import sys, time\n"
        "from tests.features.programs.test_pool import pool_of, program, YES, Asked\n"
        "ways = ('hangs', 'ignores_signals', 'stops_its_launcher')\n"
        "pool = pool_of(*map(program, ways))\n"
        "pool.reset(0, 0, 0); pool.reset(1, 1, 0)\n"
        "seen = 0\n"
        "while seen < 3:\n"
        "    for key, heard in pool.poll(1.0):\n"
        "        if isinstance(heard, Asked):\n"
        "            pool.answer(key, heard.number, YES)\n"
        "            seen += 1\n"
        "            if seen == 2:\n"
        "                pool.reset(2, 2, 0)\n"
        "time.sleep(0.5)\n"
        "print('plays', flush=True)\n"
        "time.sleep(100)\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )
    assert trainer.stdout is not None and trainer.stdout.readline() == "plays\n"
    family = psutil.Process(trainer.pid).children(recursive=True)
    assert len(family) >= 4
    assert any(one.status() == psutil.STATUS_STOPPED for one in family)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    _gone, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
