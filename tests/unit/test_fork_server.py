"""The fork server with real children: what they get, how they end, what is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.environments.fork_server import CannotFork, Child, ForkServer, ForkServerLost

WAIT_S = 20.0
CHILD = """
import os, random, subprocess, sys, time

PREPARED = []

def prepare(modules):
    PREPARED.extend(modules)

def run(request, files):
    # Its own files are standard ones, the one that came with it and the one that lists them.
    seen = {
        "pid": os.getpid(),
        "prepared": PREPARED,
        "loaded": "decimal" in sys.modules,
        "files": len(os.listdir("/proc/self/fd")) - 1,
        "drawn": random.random(),
        "leads": os.getsid(0) == os.getpid(),
        "descendants": [],
    }
    if request.get("leaves"):
        command = [sys.executable, "-c", "import time; time.sleep(1000)"]
        for environment in ({}, {"MARK_OF_TEST": "kept"}):
            child = subprocess.Popen(command, start_new_session=True, env=environment)
            seen["descendants"].append(child.pid)
    os.write(files[0], __import__("json").dumps(seen).encode() + b"\\n")
    time.sleep(request.get("sleeps", 0))
    if request.get("raises"):
        raise RuntimeError("no child")
    return request.get("code", 0)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    file = tmp_path / "child.py"
    file.write_text(CHILD)
    server = ForkServer(file, modules=["decimal", "no_such_module"])
    yield server
    server.stop()


def start(server: ForkServer, mark: str = "", **request: Any) -> tuple[Child, dict[str, Any]]:
    """Starts a child; returns it with what it says of itself."""
    ours, theirs = os.pipe()
    child = server.start(request, [theirs], mark)
    os.close(theirs)
    with os.fdopen(ours) as stream:
        seen = json.loads(stream.readline())
    assert child.started.result(WAIT_S) == seen["pid"]
    return child, seen


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def fork_server_of(seen: dict[str, Any]) -> psutil.Process:
    """Returns the process behind a child's keeper."""
    _, server = psutil.Process(seen["pid"]).parents()[:2]
    return server


def wait_until(reached: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not reached() and time.monotonic() < until:
        time.sleep(0.01)
    assert reached()


def test_a_child_starts_behind_the_imports_with_its_own_files_alone(server: ForkServer) -> None:
    assert list(server.ready.result(WAIT_S)) == ["no_such_module"]
    children = [start(server) for _ in range(2)]
    for child, seen in children:
        assert seen["loaded"] and seen["leads"]
        assert seen["prepared"] == ["decimal", "no_such_module"]
        assert seen["files"] == 4
        assert child.ended.result(WAIT_S) == 0
    assert len({seen["drawn"] for _, seen in children}) == 2


def test_a_childs_exit_code_and_signal_are_told(server: ForkServer) -> None:
    by_code, _ = start(server, code=7)
    by_error, _ = start(server, raises=True)
    by_signal, seen = start(server, sleeps=1000)
    os.kill(seen["pid"], signal.SIGTERM)
    codes = [child.ended.result(WAIT_S) for child in (by_code, by_error, by_signal)]
    assert codes == [7, 1, -signal.SIGTERM]


def test_a_killed_child_ends_with_all_that_it_started(server: ForkServer) -> None:
    killed, seen = start(server, sleeps=1000, leaves=True)
    other, _ = start(server, sleeps=1000)
    killed.kill()
    assert killed.ended.result(WAIT_S) == -signal.SIGKILL
    assert not any(alive(pid) for pid in seen["descendants"])
    assert not other.ended.done()


def test_orphans_end_with_their_child_but_for_those_of_a_mark_that_still_runs(
    server: ForkServer,
) -> None:
    marked, _ = start(server, "MARK_OF_TEST=kept", sleeps=1000)
    leaves, seen = start(server, leaves=True)
    assert leaves.ended.result(WAIT_S) == 0
    assert [alive(pid) for pid in seen["descendants"]] == [False, True]
    marked.kill()
    marked.ended.result(WAIT_S)
    assert not any(alive(pid) for pid in seen["descendants"])


def test_children_end_with_their_fork_server_and_are_reported(server: ForkServer) -> None:
    child, seen = start(server, "MARK_OF_TEST=kept", sleeps=1000, leaves=True)
    fork_server_of(seen).kill()
    with pytest.raises(ForkServerLost):
        child.ended.result(WAIT_S)
    _, marked = seen["descendants"]
    wait_until(lambda: not alive(seen["pid"]) and not alive(marked))
    os.kill(seen["descendants"][0], signal.SIGKILL)
    assert server.is_lost
    with pytest.raises(CannotFork):
        server.start({}, []).started.result(WAIT_S)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT, signal.SIGSTOP])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_child_that_signals_its_parent_hits_no_other_child(
    server: ForkServer, number: signal.Signals, whole_group: bool
) -> None:
    other, seen_other = start(server, sleeps=1000)
    child, seen = start(server, sleeps=1000)
    keeper = psutil.Process(seen["pid"]).ppid()
    if whole_group:
        os.killpg(os.getpgid(keeper), number)
    else:
        os.kill(keeper, number)
    if number == signal.SIGSTOP:
        child.kill()
        number = signal.SIGKILL
    assert child.ended.result(WAIT_S) == -number
    wait_until(lambda: not alive(seen["pid"]))
    third, _ = start(server)
    assert third.ended.result(WAIT_S) == 0
    assert alive(seen_other["pid"])
    assert not other.ended.done()


def test_a_fork_server_that_its_child_has_stopped_goes_on_when_it_is_asked(
    server: ForkServer,
) -> None:
    child, seen = start(server, sleeps=1000)
    fork_server_of(seen).suspend()
    child.kill()
    assert child.ended.result(WAIT_S) == -signal.SIGKILL


def test_a_fork_server_ends_with_whoever_started_it(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from workers.environments.fork_server import ForkServer\n"
        f"server = ForkServer(Path({str(tmp_path / 'child.py')!r}))\n"
        "child = server.start({'sleeps': 1000}, [1])\n"
        "print(child.started.result(), flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        [pid] = [int(line) for line in lines if line.strip().isdigit()]
        parent = psutil.Process(pid).parent()
        process.kill()
    assert parent is not None
    wait_until(lambda: not alive(pid) and not alive(parent.pid))
