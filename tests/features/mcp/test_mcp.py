"""Tools from MCP servers: real ones of the official package, and bad ones written by hand."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from custom.agent import AgentSpec
from custom.confine import kill_tree
from custom.envs.guess_number import GuessNumber
from custom.tools import Tool, ToolCall, ToolDefinition, ToolRegistry
from features.mcp.mcp_session import McpServer
from features.mcp.mcp_tools import add_mcp_tools
from tests.cases import fast_and_long
from tests.conftest import PROJECT
from tests.mcp_servers import FAULTS

pytest.importorskip("mcp")
FILE = str(PROJECT / "tests/mcp_servers.py")


def server(kind: str = "counter", **settings: Any) -> McpServer:
    arguments: dict[str, Any] = {"name": "counter", "command": sys.executable}
    arguments |= {"args": (FILE, kind), "timeout_s": 10.0, "start_timeout_s": 30.0}
    return McpServer(**(arguments | settings))


@pytest.fixture
def registry_of() -> Iterator[Callable[..., ToolRegistry]]:
    """Makes registries of MCP tools, and closes them after the test."""
    made: list[ToolRegistry] = []

    def make(*servers: McpServer, own: tuple[Tool, ...] = ()) -> ToolRegistry:
        registry = ToolRegistry(own)
        made.append(registry)
        add_mcp_tools(registry, servers)
        return registry

    yield make
    for registry in made:
        registry.close()


def is_gone(pid: int) -> bool:
    """Whether a process has ended; nobody may have asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


@pytest.fixture(autouse=True)
def no_server_is_left() -> Iterator[None]:
    before = set(servers_alive())
    yield
    deadline = time.monotonic() + 8
    while time.monotonic() < deadline and set(servers_alive()) - before:
        time.sleep(0.05)
    assert not set(servers_alive()) - before


def servers_alive() -> list[int]:
    """Process ids of servers under this process, guards among them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            is_server = any("mcp_servers.py" in word for word in process.cmdline())
            if is_server and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.seconds
def test_tools_of_a_server_are_offered_with_their_schemas_and_answer(
    registry_of: Callable[..., ToolRegistry],
) -> None:
    registry = registry_of(server())
    schemas = {entry["function"]["name"]: entry["function"] for entry in registry.schemas()}
    assert list(schemas) == ["add", "fail", "sleep", "variable", "leave_behind"]
    assert schemas["add"]["description"] == "Adds to the number and returns it."
    assert schemas["add"]["parameters"]["properties"]["amount"]["type"] == "integer"
    assert registry.execute_tool("add", amount=2) == (True, "2")
    assert registry.execute_tool("add", amount=3) == (True, "5")
    wrong = registry.execute(ToolCall("add", {"amount": "many"}))
    assert wrong.error_kind == "bad_arguments"
    failed = registry.execute(ToolCall("fail", {"reason": "not today"}))
    assert failed.error_kind == "exception"
    assert "not today" in failed.result


@pytest.mark.seconds
def test_an_episode_begins_with_a_fresh_server_and_a_slot_keeps_its_own(
    registry_of: Callable[..., ToolRegistry],
) -> None:
    fresh, kept = registry_of(server()), registry_of(server(session="slot"))
    for registry, second in ((fresh, "1"), (kept, "2")):
        registry.begin_episode({})
        assert registry.execute_tool("add", amount=1) == (True, "1")
        registry.begin_episode({})
        assert registry.execute_tool("add", amount=1) == (True, second)


@pytest.mark.seconds
def test_agents_have_sessions_of_their_own_which_end_with_them() -> None:
    spec = AgentSpec(GuessNumber, mcp_servers=(server(session="slot"),), parser="json")
    agents = [spec.build(), spec.build()]
    assert len(set(servers_alive())) >= 2
    for agent in agents:
        agent.reset(1)
        observation = agent.step('{"name": "add", "arguments": {"amount": 4}}').observation
        assert observation[0]["content"].startswith("4")
        agent.close()


@pytest.mark.seconds
def test_a_call_ends_at_its_deadline_and_the_next_one_is_answered(
    registry_of: Callable[..., ToolRegistry],
) -> None:
    registry = registry_of(server(timeout_s=0.4))
    begun = time.monotonic()
    late = registry.execute(ToolCall("sleep", {"seconds": 30}))
    assert late.error_kind == "timeout"
    assert "did not answer sleep within 0.4 s" in late.result
    assert time.monotonic() - begun < 3
    assert registry.execute_tool("add", amount=1) == (True, "1")


@pytest.mark.seconds
def test_equal_names_are_told_apart_by_their_servers(
    registry_of: Callable[..., ToolRegistry],
) -> None:
    class Fail(Tool):
        definition = ToolDefinition("fail", "Of the agent's own.")

        def execute(self) -> str:
            return "mine"

    one = server(name="one", tools=("add",))
    two = server(name="two", tools=("add", "fail"))
    registry = registry_of(one, two, own=(Fail(),))
    assert list(registry.tools) == ["fail", "one_add", "two_add", "two_fail"]
    assert registry.execute_tool("one_add", amount=1) == (True, "1")
    assert registry.execute_tool("two_add", amount=5) == (True, "5")
    with pytest.raises(ValueError, match=r"mcp\.servers\.one\.tools: the server has no sub; "):
        registry_of(server(name="one", tools=("sub",)))


@pytest.mark.seconds
def test_a_server_sees_the_variables_that_it_is_given_and_no_others(
    registry_of: Callable[..., ToolRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDED", "yes")
    monkeypatch.setenv("SECRET", "no")
    registry = registry_of(server(env={"GIVEN": "too"}, env_from=("HANDED",)))
    seen = [
        registry.execute_tool("variable", name=name)[1] for name in ("GIVEN", "HANDED", "SECRET")
    ]
    assert seen == ["too", "yes", "none"]


@pytest.mark.seconds
def test_what_a_server_started_ends_with_it(registry_of: Callable[..., ToolRegistry]) -> None:
    registry = registry_of(server())
    ok, pid = registry.execute_tool("leave_behind")
    assert ok
    assert psutil.pid_exists(int(pid))
    registry.close()
    deadline = time.monotonic() + 5
    while not is_gone(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_gone(int(pid))


KILLED = """
import sys, time
from custom.tools import ToolRegistry
from features.mcp.mcp_session import McpServer
from features.mcp.mcp_tools import add_mcp_tools
registry = ToolRegistry()
server = McpServer(name="c", command=sys.executable, args=(sys.argv[1], "counter"))
add_mcp_tools(registry, [server])
print(registry.execute_tool("leave_behind")[1], flush=True)
time.sleep(600)
"""


@pytest.mark.seconds
def test_servers_end_when_the_run_is_killed() -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, FILE], stdout=subprocess.PIPE, cwd=PROJECT
    )
    assert run.stdout is not None
    left = int(run.stdout.readline())
    started = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
    assert left in started
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    deadline = time.monotonic() + 10
    while not all(map(is_gone, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(is_gone, started))


CANNOT_START = {
    "silent": "did not start within 3 s",
    "exits": "does not start",
    "bad_schema": "the parameters of tool 'act'",
    "endless_list": "lists more than 200 tools",
}
CALLS = {
    "hangs_in_calls": ("timeout",),
    "floods_a_line": ("exception",),
    # A busy machine does not get through what it has written by then.
    "floods_lines": ("exception", "timeout"),
    "dies_in_calls": ("exception",),
    "deaf": ("timeout",),
    "garbage": ("",),
    "huge_result": ("",),
}


def test_every_fault_is_tried() -> None:
    assert sorted(FAULTS) == sorted([*CANNOT_START, *CALLS])


@pytest.mark.seconds
@pytest.mark.parametrize("fault", CANNOT_START)
def test_a_server_that_cannot_be_used_is_one_sentence(
    registry_of: Callable[..., ToolRegistry], fault: str
) -> None:
    with pytest.raises(ValueError, match=CANNOT_START[fault]) as error:
        registry_of(server(fault, start_timeout_s=3.0))
    assert "MCP server counter" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.seconds
@pytest.mark.parametrize("fault", fast_and_long(CALLS, fast=["hangs_in_calls"]))
def test_a_bad_server_costs_the_call_and_the_next_episode_has_a_new_one(
    registry_of: Callable[..., ToolRegistry], fault: str
) -> None:
    registry = registry_of(server(fault, timeout_s=2.0))
    before = psutil.Process().memory_info().rss
    for _ in range(2):
        registry.begin_episode({})
        begun = time.monotonic()
        record = registry.execute(ToolCall("act"), max_chars=500)
        assert record.error_kind in CALLS[fault]
        assert len(record.result) <= 500
        assert time.monotonic() - begun < 6
    if fault == "dies_in_calls":
        again = registry.execute(ToolCall("act"))
        assert "has ended in this episode" in again.result
    assert psutil.Process().memory_info().rss - before < 300 * 2**20


def test_a_program_that_is_not_there_is_one_sentence(
    registry_of: Callable[..., ToolRegistry],
) -> None:
    with pytest.raises(ValueError, match="MCP server counter does not start"):
        registry_of(server(command="/no/such/program"))


@pytest.fixture(scope="module")
def http_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, FILE, "counter", str(port)],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            break
        except OSError:
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/mcp"
    kill_tree(process.pid)
    process.wait()


def over_http(url: str, **settings: Any) -> McpServer:
    return server(command=None, args=(), url=url, **settings)


@pytest.mark.seconds
def test_tools_over_http_answer_fail_and_time_out(
    registry_of: Callable[..., ToolRegistry], http_url: str
) -> None:
    registry = registry_of(over_http(http_url, timeout_s=0.7))
    assert registry.execute_tool("add", amount=2)[0]
    assert registry.execute(ToolCall("fail", {"reason": "no"})).error_kind == "exception"
    assert registry.execute(ToolCall("sleep", {"seconds": 30})).error_kind == "timeout"
    registry.begin_episode({})
    assert registry.execute_tool("add", amount=2)[0]


def test_an_http_server_that_is_not_there_or_is_none_is_one_sentence(
    registry_of: Callable[..., ToolRegistry], tmp_path: Path
) -> None:
    from tests.model_server import flood, model_server, say

    with socket.create_server(("127.0.0.1", 0)) as reserved:
        gone = f"http://127.0.0.1:{reserved.getsockname()[1]}/mcp"
    with pytest.raises(ValueError, match="MCP server counter does not start"):
        registry_of(over_http(gone, start_timeout_s=3.0))
    for answer in (say("hello"), flood):
        with (
            model_server(answer) as other,
            pytest.raises(ValueError, match=r"MCP server counter d(id|oes) not start"),
        ):
            registry_of(over_http(other.url, start_timeout_s=3.0))


def test_headers_hold_what_the_environment_holds(
    registry_of: Callable[..., ToolRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.model_server import model_server, say

    monkeypatch.setenv("TOKEN", "Bearer secret")
    with model_server(say("hello")) as other:
        settings = over_http(other.url, headers_env={"Authorization": "TOKEN"}, start_timeout_s=2.0)
        with pytest.raises(ValueError) as error:
            registry_of(settings)
        assert other.keys[0] == "Bearer secret"
    assert "secret" not in f"{error.value} {settings}"
