"""The pool of environments: deadlines, crashes and garbage, with real sleeps and real deaths."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from custom import env_factory
from custom.agent import AgentSpec
from custom.env_factory import Library
from tests.unit import pool_environments
from tests.unit.pool_environments import Obedient, reward_fn
from workers.environments import clock
from workers.environments.pool import PACED_CALLS, Answer, EnvironmentPool
from workers.environments.reply import StepReply

PROJECT = Path(__file__).resolve().parents[2]
WORKERS = pytest.mark.parametrize("isolation", ["thread", "process"])


def threads() -> int:
    return sum(thread.name.startswith("environment") for thread in threading.enumerate())


def hanging(pool: EnvironmentPool) -> int:
    """Counts the threads that a pool has given up and that still run."""
    return sum(slot.discarded and slot.thread.is_alive() for slot in list(pool._slots))


def processes() -> int:
    """Counts the fork server and its env workers, which share its command line.

    Other tests' processes, such as Ray's, come and go.
    """
    count = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            count += (
                "fork_server_process" in " ".join(child.cmdline())
                and child.status() != psutil.STATUS_ZOMBIE
            )
    return count


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Every test leaves as many threads and processes as it found."""
    before = threads(), processes()
    pool_environments.RELEASE.clear()
    yield
    pool_environments.RELEASE.set()
    wait_until(lambda: (threads(), processes()) == before)


def alive(process: psutil.Process | None) -> bool:
    try:
        return (
            process is not None
            and process.is_running()
            and process.status() != psutil.STATUS_ZOMBIE
        )
    # It ended in between.
    except psutil.NoSuchProcess:
        return False


def wait_until(reached: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.01)
    assert reached()


def pool_of(isolation: str = "thread", *, reward: Any = None, **settings: Any) -> EnvironmentPool:
    """A pool of obedient environments; what the pool does not take goes to the environment."""
    names = ("num_workers", "step_timeout_s", "episode_timeout_s", "step_wall_timeout_s")
    own = {name: settings.pop(name) for name in names if name in settings}
    spec = AgentSpec(Obedient, settings, reward_fn=reward)
    return EnvironmentPool([spec], isolation=isolation, **own)  # type: ignore[arg-type]


def answers(pool: EnvironmentPool, count: int, seconds: float = 20.0) -> list[Answer]:
    """The next replies with the keys of their episodes."""
    got: list[Answer] = []
    end = time.monotonic() + seconds
    while len(got) < count and time.monotonic() < end:
        got += pool.poll(0.2)
    assert len(got) == count
    return got


def collect(pool: EnvironmentPool, count: int, seconds: float = 20.0) -> list[StepReply]:
    return [reply for _, reply in answers(pool, count, seconds)]


def start(pool: EnvironmentPool, *keys: Any) -> None:
    for seed, key in enumerate(keys):
        pool.reset(key, 0, seed)
    assert [r.error for r in collect(pool, len(keys)) if r.failure] == []


def ask(pool: EnvironmentPool, key: Any, text: str) -> StepReply:
    pool.step(key, text)
    return collect(pool, 1)[0]


def finish(pool: EnvironmentPool, *keys: Any) -> list[StepReply]:
    for key in keys:
        pool.finish(key, "done")
    return collect(pool, len(keys))


def words(reply: StepReply) -> list[str]:
    assert not reply.failure, reply.error
    return reply.messages[0]["content"].split()


@WORKERS
def test_an_episode_is_played_and_scored(isolation: str) -> None:
    with pool_of(isolation, reward=reward_fn) as pool:
        assert pool.tool_schemas == [None]
        pool.reset("a", 0, 11)
        [(key, first)] = answers(pool, 1)
        assert (key, first.failure, first.done) == ("a", "", False)
        assert first.messages == [{"role": "user", "content": "seed 11"}]
        second = ask(pool, "a", "say hello")
        assert second.messages == [{"role": "user", "content": "hello"}]
        assert second.tool_calls == [] and second.reward == 0.0
        assert ask(pool, "a", "end").done
        [last] = finish(pool, "a")
        assert (last.reward, last.done) == (2.0, True)


def test_without_a_reward_function_finish_says_so() -> None:
    with pool_of() as pool:
        start(pool, 1)
        assert ask(pool, 1, "say x").reward == 0.5
        assert [r.reward for r in finish(pool, 1)] == [None]


@pytest.mark.seconds
@WORKERS
def test_a_slow_environment_does_not_hold_up_the_others(isolation: str) -> None:
    with pool_of(isolation) as pool:
        start(pool, "slow", "fast")
        pool.step("slow", "sleep 0.6")
        pool.step("fast", "say x")
        (first_key, first), (second_key, second) = answers(pool, 2)
        assert (first_key, second_key) == ("fast", "slow")
        # A wait for a processor between the last look and the call is not the call's.
        assert first.seconds < second.seconds and second.seconds >= 0.5


@WORKERS
def test_poll_comes_back_without_an_answer_too(isolation: str) -> None:
    with pool_of(isolation) as pool:
        assert pool.poll(0.0) == []
        begun = time.monotonic()
        assert pool.poll(0.2) == [] and time.monotonic() - begun >= 0.2


@pytest.mark.seconds
@WORKERS
@pytest.mark.parametrize("where", ["reset", "step", "finish"])
def test_a_call_that_hangs_is_a_timeout_at_its_deadline(isolation: str, where: str) -> None:
    with pool_of(isolation, step_timeout_s=0.4, hang_in=where, reward=reward_fn) as pool:
        assert pool.tool_schemas == [None]
        pool.reset("a", 0, 0)
        if where != "reset":
            collect(pool, 1)
            pool.step("a", "loop") if where == "step" else pool.finish("a", "done")
        [(key, reply)] = answers(pool, 1)
        assert (key, reply.failure) == ("a", "env_timeout")
        assert where in reply.error and reply.seconds >= 0.3
        with pytest.raises(KeyError, match="a"):
            pool.finish("a", "env_timeout")


@pytest.mark.seconds
@WORKERS
def test_an_episodes_deadline_cuts_the_call_that_would_exceed_it(isolation: str) -> None:
    with pool_of(isolation, episode_timeout_s=0.7) as pool:
        start(pool, "a")
        assert not ask(pool, "a", "sleep 0.4").failure
        time.sleep(0.4)  # the policy's time does not count
        reply = ask(pool, "a", "sleep 5")
        assert reply.failure == "env_timeout" and reply.seconds < 2
        start(pool, "a")  # the next episode has its own time
        assert not ask(pool, "a", "sleep 0.4").failure


@pytest.mark.seconds
def test_a_ceiling_by_the_walls_clock_does_not_cut_what_the_deadline_allows() -> None:
    with pool_of(step_timeout_s=1.5, step_wall_timeout_s=0.2) as pool:
        start(pool, "a")
        assert not ask(pool, "a", "sleep 0.8").failure
        assert ask(pool, "a", "sleep 5").failure == "env_timeout"


@pytest.mark.seconds
def test_without_a_deadline_there_is_no_ceiling_either() -> None:
    with pool_of(step_wall_timeout_s=0.1) as pool:
        start(pool, "a")
        assert not ask(pool, "a", "sleep 0.6").failure


def test_instant_calls_are_timed_without_a_look_at_what_their_thread_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Counter[str]()
    look = clock.waited_for_processor

    def counted(task: str) -> float:
        looks[task] += 1
        return look(task)

    monkeypatch.setattr(clock, "waited_for_processor", counted)
    with pool_of(step_timeout_s=60.0) as pool:
        start(pool, "a")
        looks.clear()
        for _ in range(200):
            assert ask(pool, "a", "say x").seconds < 0.5
        assert looks.total() < 20
        looks.clear()
        # Less what the thread waited for a processor, which a busy machine makes longer.
        assert ask(pool, "a", "sleep 0.2").seconds >= 0.1 and looks.total() >= 1


@pytest.mark.seconds
def test_calls_that_sleep_begin_together_though_threads_wake_in_pace() -> None:
    count = 16 * PACED_CALLS
    with pool_of(step_timeout_s=60.0) as pool:
        start(pool, *range(count))
        begun = time.monotonic()
        for key in range(count):
            pool.step(key, "sleep 0.5")
        collect(pool, count)
        assert time.monotonic() - begun < 2.0


@pytest.mark.seconds
def test_finish_has_a_deadline_of_its_own() -> None:
    with pool_of(episode_timeout_s=0.4, hang_in="finish", reward=reward_fn) as pool:
        pool.close_timeout_s = 0.2
        start(pool, "a")
        assert not ask(pool, "a", "sleep 0.2").failure
        [reply] = finish(pool, "a")
        assert reply.failure == "env_timeout" and reply.seconds >= 0.3


@pytest.mark.seconds
def test_waiting_for_a_permit_counts_for_no_deadline() -> None:
    with pool_of(num_workers=1, step_timeout_s=0.5, episode_timeout_s=0.5) as pool:
        start(pool, *range(5))
        begun = time.monotonic()
        for key in range(5):
            pool.step(key, "sleep 0.2")
        assert [(key, reply.failure) for key, reply in answers(pool, 5)] == [
            (key, "") for key in range(5)
        ]
        assert time.monotonic() - begun > 0.95


@pytest.mark.seconds
@pytest.mark.parametrize("limit", [1, 3, None])
def test_no_more_calls_run_at_once_than_there_are_permits(limit: int | None) -> None:
    pool_environments.MOST[0] = 0
    with pool_of(num_workers=limit) as pool:
        start(pool, *range(9))
        for key in range(9):
            pool.step(key, "count 0.1")
        collect(pool, 9)
    assert pool_environments.MOST[0] == (limit or 9)


@pytest.mark.seconds
def test_a_call_that_hangs_gives_its_permit_back() -> None:
    with pool_of(num_workers=1, step_timeout_s=0.2) as pool:
        start(pool, "a", "b")
        pool.step("a", "loop")
        pool.step("b", "say x")
        assert [(key, reply.failure) for key, reply in answers(pool, 2)] == [
            ("a", "env_timeout"),
            ("b", ""),
        ]


@pytest.mark.seconds
@WORKERS
@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("raise plain", "RuntimeError: told to: plain"),
        ("raise exit", "SystemExit: 3"),
        ("raise interrupt", "KeyboardInterrupt"),
        ("raise evil", "EvilError"),
        ("raise long", "ValueError: xxx"),
        ("recurse", "RecursionError"),
        ("unknown", "AttributeError"),
        ("garbage number", "BadEnvironment"),
        ("garbage nan", "BadEnvironment"),
        ("garbage shape", "BadEnvironment"),
        ("garbage observation", "BadEnvironment"),
        ("garbage info", "BadEnvironment"),
    ],
)
def test_whatever_an_environment_raises_or_returns_is_a_crash_of_that_episode(
    isolation: str, action: str, text: str
) -> None:
    with pool_of(isolation) as pool:
        start(pool, "a")
        reply = ask(pool, "a", action)
        assert (reply.failure, reply.messages, reply.reward) == ("env_crash", [], None)
        assert text in reply.error.splitlines()[0] and 20 < len(reply.error) <= 2000
        start(pool, "a")
        assert words(ask(pool, "a", "say again")) == ["again"]


def test_a_crash_names_the_line_of_the_environment() -> None:
    with pool_of() as pool:
        start(pool, "a")
        assert "pool_environments.py" in ask(pool, "a", "raise plain").error


@pytest.mark.seconds
@WORKERS
def test_a_huge_observation_is_cut_and_no_failure(isolation: str) -> None:
    with pool_of(isolation) as pool:
        start(pool, "a")
        reply = ask(pool, "a", "garbage megabyte")
        assert not reply.failure and 15_000 < len(reply.messages[0]["content"]) <= 20_000


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("how", "text"), [("exit", "exit code 7"), ("crash", "SIGSEGV"), ("kill", "SIGKILL")]
)
def test_the_death_of_a_process_is_a_crash_that_says_how_it_died(how: str, text: str) -> None:
    with pool_of("process", step_timeout_s=5.0) as pool:
        start(pool, "a", "b")
        reply = ask(pool, "a", f"die {how}")
        assert reply.failure == "env_crash" and text in reply.error
        assert words(ask(pool, "b", "say alive")) == ["alive"]


@pytest.mark.seconds
@pytest.mark.parametrize("kind", ["unpicklable", "unreadable"])
def test_info_that_cannot_travel_stays_where_it_is(kind: str) -> None:
    with pool_of("process") as pool:
        start(pool, "a")
        reply = ask(pool, "a", f"garbage {kind}")
        assert reply.failure == "" and reply.tool_calls == []


@pytest.mark.seconds
def test_a_process_that_dies_between_calls_is_a_crash_of_the_next_one() -> None:
    with pool_of("process") as pool:
        start(pool, "a")
        pid = int(words(ask(pool, "a", "who"))[0])
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
        reply = ask(pool, "a", "say x")
        assert reply.failure == "env_crash" and "SIGTERM" in reply.error


@pytest.mark.seconds
def test_the_pool_survives_the_death_of_the_process_that_forks_its_workers() -> None:
    with pool_of("process") as pool:
        start(pool, "a")
        worker = psutil.Process(int(words(ask(pool, "a", "who"))[0]))
        # Behind its keeper.
        worker.parents()[1].kill()
        wait_until(lambda: not alive(worker))
        reply = ask(pool, "a", "say x")
        assert reply.failure == "env_crash"
        start(pool, "a")
        assert words(ask(pool, "a", "say back")) == ["back"]


@pytest.mark.seconds
def test_an_environment_that_kills_its_parent_ends_no_other_episode() -> None:
    with pool_of("process") as pool:
        for key in ("a", "b"):
            start(pool, key)
        worker = psutil.Process(int(words(ask(pool, "a", "who"))[0]))
        worker.parent().kill()  # type: ignore[union-attr]
        wait_until(lambda: not alive(worker))
        reply = ask(pool, "a", "say x")
        assert reply.failure == "env_crash" and "SIGKILL" in reply.error
        assert words(ask(pool, "b", "say on")) == ["on"]


@pytest.mark.seconds
@WORKERS
def test_a_slot_is_reused_after_a_good_episode_and_renewed_after_a_failure(isolation: str) -> None:
    with pool_of(isolation) as pool:
        seen = []
        for key, last in enumerate(["end", "end", "raise plain", "end"]):
            start(pool, key)
            seen.append(tuple(words(ask(pool, key, "who"))))
            if not ask(pool, key, last).failure:
                finish(pool, key)
        assert seen[0] == seen[1] == seen[2] != seen[3]


def test_episodes_that_run_together_have_environments_of_their_own() -> None:
    with pool_of() as pool:
        start(pool, *range(4))
        assert len({tuple(words(ask(pool, key, "who"))) for key in range(4)}) == 4


@pytest.mark.seconds
def test_processes_draw_different_random_numbers() -> None:
    with pool_of("process") as pool:
        start(pool, *range(4))
        drawn = [words(ask(pool, key, "draw")) for key in range(4)]
        assert len({d[0] for d in drawn}) == len({d[1] for d in drawn}) == 4


@pytest.mark.seconds
@WORKERS
def test_each_environment_is_closed_once(isolation: str, tmp_path: Path) -> None:
    closes = tmp_path / "closes"
    with pool_of(isolation, closes=str(closes), step_timeout_s=5.0) as pool:
        start(pool, *range(5))
        finish(pool, 0, 1)
        assert ask(pool, 2, "raise plain").failure
        wait_until(lambda: closes.exists() and closes.read_text() == "closed\n")
    assert closes.read_text() == "closed\n" * 5


@pytest.mark.seconds
@WORKERS
def test_a_late_return_closes_its_environment_and_answers_nobody(
    isolation: str, tmp_path: Path
) -> None:
    closes = tmp_path / "closes"
    with pool_of(isolation, closes=str(closes), step_timeout_s=0.4) as pool:
        start(pool, "a")
        assert ask(pool, "a", "sleep 1.0").failure == "env_timeout"
        assert hanging(pool) == 1 or isolation == "process"
        start(pool, "a")
        wait_until(closes.exists)
        assert words(ask(pool, "a", "say mine")) == ["mine"]
        assert pool.poll(0.2) == [] and hanging(pool) == 0
    assert closes.read_text() == "closed\n" * 2


@pytest.mark.seconds
def test_a_thread_that_loops_for_ever_in_python_is_ended(tmp_path: Path) -> None:
    closes = tmp_path / "closes"
    with pool_of(closes=str(closes), step_timeout_s=0.2) as pool:
        start(pool, "a")
        assert ask(pool, "a", "loop").failure == "env_timeout"
        assert hanging(pool) == 1
        wait_until(lambda: hanging(pool) == 0)
        assert closes.read_text() == "closed\n"


@pytest.mark.seconds
def test_a_thread_that_cannot_be_ended_ends_when_it_comes_back(tmp_path: Path) -> None:
    closes = tmp_path / "closes"
    with pool_of(closes=str(closes), step_timeout_s=0.2) as pool:
        start(pool, "a", "b")
        assert ask(pool, "a", "block").failure == "env_timeout"
        assert words(ask(pool, "b", "say x")) == ["x"]
    assert hanging(pool) == 1
    pool_environments.RELEASE.set()
    wait_until(lambda: hanging(pool) == 0)
    assert closes.read_text() == "closed\n" * 2


@pytest.mark.seconds
@WORKERS
def test_shutdown_does_not_wait_for_what_hangs(isolation: str) -> None:
    pool = pool_of(isolation, step_timeout_s=0.5, hang_in="close")
    start(pool, "idle", "busy", "free")
    finish(pool, "free")
    pool.step("busy", "loop")
    pool.shutdown()
    pool.shutdown()
    assert processes() == 0 or isolation == "thread"
    assert hanging(pool) == 0  # hangs of Python code are ended in threads too
    with pytest.raises(RuntimeError, match="shut down"):
        pool.reset(1, 0, 0)


def test_shutdown_drops_the_calls_that_wait_for_a_permit() -> None:
    pool = pool_of(num_workers=1, step_timeout_s=1.0)
    start(pool, "a", "b")
    pool.step("a", "sleep 0.2")
    pool.step("b", "count 0")
    pool_environments.MOST[0] = 0
    pool.shutdown()
    assert pool_environments.MOST[0] == 0


@pytest.mark.seconds
@WORKERS
def test_making_an_agent_counts_for_no_deadline_of_a_step(isolation: str) -> None:
    with pool_of(isolation, build_s=0.6, step_timeout_s=0.3, episode_timeout_s=0.3) as pool:
        start(pool, "a")
        assert words(ask(pool, "a", "say x")) == ["x"]


@pytest.mark.seconds
@WORKERS
def test_an_agent_that_cannot_be_made_fails_the_episode_or_the_start(isolation: str) -> None:
    with pool_of(isolation, fail_in="build") as pool:
        pool.reset("a", 0, 0)
        [reply] = collect(pool, 1)
        assert reply.failure == "env_crash" and "in build" in reply.error
        with pytest.raises(ValueError, match=r"environment Obedient cannot be built.*in build"):
            _ = pool.tool_schemas


@pytest.mark.seconds
@WORKERS
def test_making_an_agent_has_a_deadline_of_its_own(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.environments.pool.BUILD_TIMEOUT_S", 0.3)
    with pool_of(isolation, hang_in="build", step_timeout_s=0.3) as pool:
        pool.reset("a", 0, 0)
        [reply] = collect(pool, 1)
        assert reply.failure == "env_timeout" and "build" in reply.error


@pytest.mark.seconds
def test_agents_that_hang_while_they_are_made_do_not_hold_up_the_making_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.environments.pool.BUILD_TIMEOUT_S", 0.2)
    count = 2 * (os.cpu_count() or 1)
    specs = [AgentSpec(Obedient, {"hang_in": "build"}), AgentSpec(Obedient)]
    with EnvironmentPool(specs, isolation="thread", step_timeout_s=0.3) as pool:
        for key in range(count):
            pool.reset(key, 0, 0)
        pool.reset("good", 1, 0)
        failures = {key: reply.failure for key, reply in answers(pool, count + 1)}
        assert failures == {**dict.fromkeys(range(count), "env_timeout"), "good": ""}


def test_only_libraries_named_as_such_are_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_factory, "libraries", lambda: {"chess": Library("chess", "a:B")})
    sources = ["chess:Mate-v0", "custom.envs.x:Y", Obedient, "/a/chess.py:Z", None]
    assert [AgentSpec(source).libraries for source in sources] == [("chess",), (), (), (), ()]


def test_a_worker_in_a_process_loads_neither_torch_nor_ray() -> None:
    with pool_of("process") as pool:
        start(pool, "a")
        assert words(ask(pool, "a", "modules")) == []


@pytest.mark.seconds
def test_what_an_environment_started_dies_with_its_process() -> None:
    with pool_of("process", step_timeout_s=0.5) as pool:
        start(pool, "a", "b")
        children = [psutil.Process(int(words(ask(pool, key, "child"))[0])) for key in "ab"]
        assert ask(pool, "a", "sleep 100").failure == "env_timeout"
        wait_until(lambda: not alive(children[0]))
        assert alive(children[1])
    assert not alive(children[1])


SCRIPT = """
import sys, time
from custom.agent import AgentSpec
from workers.environments.pool import EnvironmentPool
import os

class Mine:  # lives in the main script, which no env worker may run again
    def reset(self):
        return str(os.getpid())
    def step(self, action):
        while True:
            pass

pool = EnvironmentPool([AgentSpec(Mine)], isolation="process")
for key in range(3):
    pool.reset(key, 0, 0)
pids = []
while len(pids) < 3:
    pids += [reply.error or reply.messages[0]["content"] for _, reply in pool.poll(1.0)]
pool.step(0, "x")
print(*pids, flush=True)
time.sleep(1000)
"""


@pytest.mark.seconds
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    trainer = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(PROJECT)},
        text=True,
    )
    try:
        assert trainer.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in trainer.stdout.readline().split()]
        keepers = [worker.parents()[0] for worker in workers]
        family = {*workers, *keepers, workers[0].parents()[1]}
        assert len(family) == 7 and all(alive(member) for member in family)
    finally:
        trainer.kill()
        trainer.communicate()
    wait_until(lambda: not any(alive(member) for member in family))


@pytest.mark.seconds
@WORKERS
def test_200_episodes_through_50_slots_leave_nothing(isolation: str) -> None:
    # Runs of other tests in this process may have left some.
    threads_before = threads()
    processes_before = processes()
    with pool_of(isolation, step_timeout_s=20.0) as pool:
        waiting, calls, workers = list(range(200)), Counter[int](), set()
        for _ in range(50):
            pool.reset(waiting.pop(), 0, 0)
        while calls.total() < 3 * 200:
            for key, reply in some_answers(pool):
                assert not reply.failure, reply.error
                calls[key] += 1
                if calls[key] == 1:
                    pool.step(key, "who")
                elif calls[key] == 2:
                    workers.add(tuple(words(reply)))
                    pool.finish(key, "done")
                elif waiting:
                    pool.reset(waiting.pop(), 0, 0)
        assert 1 < len(workers) <= 50
        assert threads() <= threads_before + 51
    assert threads() <= threads_before
    assert processes() <= processes_before


def some_answers(pool: EnvironmentPool) -> list[Answer]:
    got = pool.poll(20.0)
    assert got
    return got


FAULTS = {
    "raise plain": 0.1,
    "loop": 0.05,
    "garbage shape": 0.05,
    "garbage nan": 0.05,
    "garbage megabyte": 0.05,
}


@pytest.mark.seconds
@WORKERS
def test_under_a_load_of_faults_every_call_has_one_reply_and_the_counts_are_exact(
    isolation: str,
) -> None:
    rng = random.Random(5)
    actions = {
        (episode, turn): rng.choices([*FAULTS, "say x"], [*FAULTS.values(), 0.7])[0]
        for episode in range(60)
        for turn in range(3)
    }
    told = Counter[str]()
    for episode in range(60):
        played = [actions[episode, turn] for turn in range(3)]
        bad = [action for action in played if action not in ("say x", "garbage megabyte")]
        told["env_timeout" if bad[:1] == ["loop"] else "env_crash" if bad else "done"] += 1
    seen, turns, replied, asked = Counter[str](), Counter[int](), 0, 60
    with pool_of(isolation, step_timeout_s=1.0, num_workers=8) as pool:
        for episode in range(60):
            pool.reset(episode, 0, episode)
        while sum(seen.values()) < 60:
            for key, reply in some_answers(pool):
                replied += 1
                if reply.failure or turns[key] > 3:
                    seen[reply.failure or "done"] += 1
                    continue
                asked += 1
                if turns[key] == 3:
                    pool.finish(key, "done")
                else:
                    pool.step(key, actions[key, turns[key]])
                turns[key] += 1
        assert pool.poll(0.3) == []
    assert seen == told and min(told.values()) > 3 and replied == asked


def test_specs_have_slots_of_their_own() -> None:
    with EnvironmentPool(
        [AgentSpec(Obedient), AgentSpec(Obedient, {"fail_in": "reset"})], isolation="thread"
    ) as pool:
        assert pool.tool_schemas == [None, None]
        pool.reset("good", 0, 0)
        pool.reset("bad", 1, 0)
        assert {key: reply.failure for key, reply in answers(pool, 2)} == {
            "good": "",
            "bad": "env_crash",
        }


def test_an_environment_that_cannot_travel_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="isolation=thread"):
        EnvironmentPool([AgentSpec(pool_environments.Unpicklable())], isolation="process")


@pytest.mark.slow
def test_ray_workers_play_crash_hang_and_go(cluster: None, tmp_path: Path) -> None:
    closes = tmp_path / "closes"
    threads_before = threads()
    with pool_of("ray", step_timeout_s=3.0, closes=str(closes)) as pool:
        start(pool, *"abcd")
        actors = [psutil.Process(int(words(ask(pool, key, "who"))[0])) for key in "abcd"]
        assert len({actor.pid for actor in actors}) == 4 and os.getpid() not in {
            actor.pid for actor in actors
        }
        assert "SystemExit" in ask(pool, "a", "raise exit").error
        assert ask(pool, "b", "die exit").failure == "env_crash"
        assert ask(pool, "c", "sleep 100").failure == "env_timeout"
        assert ask(pool, "d", "garbage unpicklable").failure == ""
        start(pool, "a")
        actors.append(psutil.Process(int(words(ask(pool, "a", "who"))[0])))
    assert threads() <= threads_before
    assert closes.read_text() == "closed\n" * 3
    wait_until(lambda: not any(alive(actor) for actor in actors), 20.0)
