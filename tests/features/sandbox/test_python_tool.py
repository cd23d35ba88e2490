"""The Python tool stays within its limits, and shows what a snippet prints and returns."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import features.sandbox.python_snippet
from custom.tools import ToolRegistry, load_tools
from custom.tools.builtin import PythonTool
from custom.tools.parsers import ToolCall

RUNNER = Path(features.sandbox.python_snippet.__file__)


def run(code: str, **limits: Any) -> tuple[str, str]:
    outcome = ToolRegistry([PythonTool(**limits)]).execute(ToolCall("python", {"code": code}))
    return outcome.error_kind, outcome.value


def running_children() -> set[psutil.Process]:
    """Returns the processes below this one that have not ended.

    A run that restarts by itself, tried earlier in this process, has made it the parent of
    processes that lost theirs: they stay there, ended.
    """
    running = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                running.add(child)
    return running


@pytest.fixture(autouse=True)
def no_process_is_left() -> Any:
    # Those of other tests, such as Ray's, are there before.
    before = running_children()
    yield
    # One that was killed may take a moment to end.
    deadline = time.monotonic() + 5
    while running_children() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running_children() <= before


def test_a_snippet_prints_and_its_last_expression_is_shown() -> None:
    assert run("import math\nprint('a')\nx = 2\nmath.factorial(5) + x") == ("", "a\n122")
    assert run(
        "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\n"
        "class A: pass\n[f(i) for i in range(7)]"
    ) == (
        "",
        "[0, 1, 1, 2, 3, 5, 8]",
    )


def test_a_snippets_exception_is_shown_with_its_own_lines_only() -> None:
    kind, text = run("x = 1\nprint('before')\nx / 0")
    assert kind == "exception"
    assert text.startswith("before\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert 'File "snippet.py", line 3' in text
    assert str(Path(__file__).parents[2]) not in text
    assert run("def f(:")[1].endswith("SyntaxError: invalid syntax")
    assert run("import sys; sys.exit(3)") == ("exception", "[ended with status 3]")


@pytest.mark.seconds
def test_time_is_limited() -> None:
    assert run("print('hi', flush=True)\nimport time; time.sleep(60)", timeout_s=0.5) == (
        "timeout",
        "hi\n\n[ended after 0.5 s]",
    )
    assert run("while True: pass", timeout_s=1)[0] == "timeout"


@pytest.mark.seconds
def test_a_snippet_that_closes_its_output_is_ended_too() -> None:
    assert (
        run("import os, time\nos.close(1)\nos.close(2)\ntime.sleep(60)", timeout_s=0.5)[0]
        == "timeout"
    )


def test_memory_and_output_are_limited() -> None:
    kind, text = run("x = 'a' * 10**9", memory_mb=256)
    assert (kind, text.endswith("MemoryError")) == ("exception", True)
    kind, text = run("while True: print('x' * 1000)", max_output=2000)
    assert kind == "exception"
    assert text.endswith("[ended after 2000 characters of output]")
    assert len(text) < 2100


@pytest.mark.parametrize(
    "code",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
        "import os\nos.execv('/bin/true', ['true'])",
        "import subprocess\nsubprocess.run(['ls'])",
        "import os\nos.fork()",
        "import os\nos.kill(os.getppid(), 9)",
        "open('{outside}', 'w')",
        "import os\nos.remove('{file}')",
        "open('/proc/self/environ').read()",
    ],
)
def test_a_snippet_has_no_network_no_processes_and_changes_no_files(
    code: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        code = code.replace("{port}", str(server.getsockname()[1]))
        kind, text = run(
            code.replace("{outside}", f"{tmp_path}/new").replace("{file}", f"{tmp_path}/mine.txt")
        )
        with pytest.raises(TimeoutError):
            server.accept()
    assert kind == "exception"
    assert "Error" in text
    assert os.listdir(tmp_path) == ["mine.txt"]


def namespaces_are_allowed() -> bool:
    return subprocess.run(["unshare", "-rnpf", "true"], capture_output=True).returncode == 0


def test_the_kernel_too_gives_no_other_process_where_it_allows_namespaces() -> None:
    if not namespaces_are_allowed():
        pytest.skip("this machine forbids namespaces")
    assert run("import os\nos.getpid()") == ("", "1")


def test_where_the_kernel_has_no_walls_the_snippet_runs(tmp_path: Path) -> None:
    (tmp_path / "snippet.py").write_text("print(6 * 7)")
    forbidden = (
        f"import os, runpy, sys; names = runpy.run_path({str(RUNNER)!r}); main = names['main']\n"
        "main.__globals__['raise_walls'] = lambda *arguments: None\n"
        "sys.argv = ['x', str(os.getppid()), '5', str(1 << 29), '1000', '1000']; main()"
    )
    command = [sys.executable, "-I", "-S", "-u", "-c", forbidden]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("42\n", 0)


@pytest.mark.seconds
def test_a_snippet_ends_with_the_process_that_runs_the_tool(tmp_path: Path) -> None:
    code = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "time.sleep(60)"
    )
    program = (
        f"from custom.tools.builtin import PythonTool\nPythonTool(timeout_s=60).execute({code!r})"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(RUNNER.parents[2])}
    caller = subprocess.Popen([sys.executable, "-c", program], env=environment)
    below: list[psutil.Process] = []

    def started() -> bool:
        below[:] = psutil.Process(caller.pid).children(recursive=True)
        # A thread is what the snippet can show outside of its folder.
        return any(process.num_threads() > 1 for process in below)

    wait_until(started)
    caller.kill()
    caller.wait()
    wait_until(
        lambda: not any(process.is_running() and process.status() != "zombie" for process in below)
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_snippet_sees_no_variables_of_this_process_and_leaves_no_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "s3cret")
    kind, text = run(
        "import os\nopen('a.txt', 'w').write('x')\n"
        "print(sorted(os.environ), os.listdir())\nos.getcwd()"
    )
    assert (kind, "SECRET" in text, "'a.txt'" in text) == ("", False, True)
    assert not Path(text.splitlines()[-1].strip("'")).exists()


def test_snippets_run_side_by_side_in_threads() -> None:
    results: list[tuple[str, str]] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(run(f"{i} * 2"))) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(results) == [("", "0"), ("", "2"), ("", "4"), ("", "6")]


@pytest.mark.parametrize("source", ["python", "custom.tools.builtin:PythonTool"])
def test_the_tool_is_loaded_by_its_name_and_by_its_class(source: str) -> None:
    assert [*load_tools((source,)).tools] == ["python"]
