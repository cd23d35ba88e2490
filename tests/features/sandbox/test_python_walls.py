"""Tests what holds a snippet that has broken out of its interpreter.

Each way out is tried for real, and fails.
"""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

import features.sandbox.python_snippet
from custom.tools import ToolError
from features.sandbox.python_tool import PythonTool
from features.sandbox.walls import MISSING, missing_walls, standing_walls

RUNNER = Path(features.sandbox.python_snippet.__file__)


def needs(*walls: str) -> None:
    for wall in walls:
        if not standing_walls()[wall]:
            pytest.skip(f"this machine allows no such wall: {wall}")


def run(code: str, **limits: Any) -> str:
    """Runs the snippet and returns what it printed, an exception's text included."""
    tool = PythonTool(**{"timeout_s": 20.0, **limits})
    try:
        return tool.execute(textwrap.dedent(code))
    except (ToolError, TimeoutError) as error:
        return str(error)


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    """A file of the user that no snippet may read or change, alone in its folder."""
    folder = tmp_path / ".ssh"
    folder.mkdir(mode=0o700)
    file = folder / "id"
    file.write_text("s3cret")
    file.chmod(0o600)
    yield file
    assert os.listdir(folder) == ["id"]
    assert file.read_text() == "s3cret"
    assert file.stat().st_mode & 0o777 == 0o600


# --- Files ---


@pytest.mark.parametrize(
    "code",
    [
        "folder = os.open({folder!r}, os.O_RDONLY)\n"
        "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=folder)",
        "folder = os.open({folder!r}, os.O_RDONLY)\n"
        "os.open('id', os.O_WRONLY | os.O_TRUNC, dir_fd=folder)",
        "import sqlite3\nsqlite3.connect({folder!r} + '/new').execute('create table t (x)')",
        "os.mkfifo({folder!r} + '/new')",
        "os.mknod({folder!r} + '/new')",
        "import subprocess, sys\n"
        "class Silent:\n"
        "    def audit(self, *arguments): pass\n"
        "    def __getattr__(self, name): return getattr(sys, name)\n"
        "subprocess.sys = Silent()\n"
        "subprocess.run(['/bin/sh', '-c', 'echo out > ' + {folder!r} + '/new'])",
    ],
    ids=["open-new", "open-file", "sqlite3", "mkfifo", "mknod", "fork_exec"],
)
def test_what_the_interpreter_does_not_see_changes_no_file(code: str, private: Path) -> None:
    needs("files_read_only")
    text = run("import os\n" + code.replace("{folder!r}", repr(str(private.parent))))
    assert "Error" in text


def test_the_c_library_opens_no_file_outside(private: Path) -> None:
    needs("files_read_only", "files_private")
    code = f"""
        import ctypes, os
        libc = ctypes.CDLL(None)
        file = {str(private)!r}.encode()
        new = file + b".new"
        print(libc.open(file, os.O_RDONLY), libc.open(file, os.O_WRONLY | os.O_TRUNC))
        print(libc.truncate(file, 0))
        print(libc.open(new, os.O_WRONLY | os.O_CREAT, 0o600), libc.creat(new, 0o600))
        print(libc.unlink(file), libc.rename(file, new), libc.symlink(b"/", new))
        print(libc.chmod(file, 0o777), libc.chmod(os.__file__.encode(), 0o777))
        print(libc.chown(file, 1, 1))
        """
    assert run(code) == "-1 -1\n-1\n-1 -1\n-1 -1 -1\n-1 -1\n-1"


def test_a_database_in_the_folder_works() -> None:
    code = """
        import sqlite3
        with sqlite3.connect('a.db') as base:
            base.execute('create table t (x)')
            base.execute('insert into t values (3)')
        base.execute('select x from t').fetchall()
        """
    assert run(code) == "[(3,)]"


def test_no_file_of_the_user_is_read(private: Path) -> None:
    needs("files_private")
    for path in (
        private,
        Path(__file__),
        Path.home() / ".bashrc",
        Path("/etc/passwd"),
        Path("/proc/1/environ"),
    ):
        text = run(f"open({str(path)!r}, 'rb').read()")
        assert "PermissionError" in text or "FileNotFoundError" in text


def test_a_new_root_shows_neither_the_names_of_files_nor_this_process() -> None:
    needs("disk_limited")
    paths = ("/proc/self", "/sys/kernel", "/home", "/var")
    text = run(f"import os\nprint([os.path.exists(path) for path in {paths}])")
    assert text == "[False, False, False, False]"


def test_the_modules_of_the_standard_library_are_found() -> None:
    modules = (
        "asyncio, bz2, ctypes, decimal, email, hashlib, json, lzma, multiprocessing, sqlite3, ssl, "
        "zlib, zoneinfo"
    )
    assert run(f"import {modules}\nimport os\nos.cpu_count() > 0") == "True"
    threads = """
        import threading
        t = threading.Thread(target=print, args=('in a thread',))
        t.start()
        t.join()
        """
    assert run(threads) == "in a thread"


# --- The folder's size ---


def test_the_folder_takes_files_up_to_its_limit_and_leaves_none_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("disk_limited")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = """
        for i in range(100):
            open(str(i), "wb", buffering=0).write(bytes(1 << 20))
            print(i + 1, flush=True)
        """
    lines = run(code, disk_mb=4).splitlines()
    assert lines[:4] == ["1", "2", "3", "4"]
    assert lines[-1] == "OSError: [Errno 28] No space left on device"
    assert len(run(code).splitlines()) >= 16
    assert "File too large" in run("with open('a', 'wb') as f: f.write(bytes((1 << 20) + 1))")
    assert "No space left" in run("for i in range(10**5): open(str(i), 'w').close()")
    assert os.listdir(tmp_path) == []


# --- The network ---


def test_the_c_library_makes_no_connection() -> None:
    needs("network_absent")
    code = """
        import ctypes, os, socket, struct
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in (1, 2, 3):
            made = libc.socket(socket.AF_INET, kind, 0)
            family = struct.pack("=H", socket.AF_INET)
            address = family + struct.pack(">H4s8x", 53, bytes([127, 0, 0, 1]))
            print(made < 0 or libc.sendto(made, b"x", 1, 0, address, 16) < 0)
        """
    assert run(code) == "True\nTrue\nTrue"


def test_a_network_namespace_has_no_interface_but_its_own(tmp_path: Path) -> None:
    needs("disk_limited")
    code = "import socket\nprint([name for _, name in socket.if_nameindex()])"
    assert replaced(tmp_path, code, "refuse_calls") == "['lo']\n"


# --- Processes ---


def test_a_fork_bomb_ends_and_leaves_no_process() -> None:
    needs("processes_contained")
    # It gives up the ties to its caller first.
    code = """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.prctl(1, 0, 0, 0, 0)
        libc.setsid()
        while True:
            libc.fork()
        """
    assert "[ended after 1 s]" in run(code, timeout_s=1)
    time.sleep(0.1)
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert [
        command for command in commands if str(RUNNER) in command and str(os.getpid()) in command
    ] == []


def test_no_other_process_is_signalled_or_limited() -> None:
    needs("processes_contained")
    caller = os.getpid()
    code = f"""
        import fcntl, os, resource
        read, write = os.pipe()
        for action, *arguments in (
            (os.kill, {caller}, 0),
            (resource.prlimit, {caller}, resource.RLIMIT_CORE),
            (fcntl.fcntl, read, fcntl.F_SETOWN, {caller}),
        ):
            try:
                action(*arguments)
            except OSError:
                print("refused")
        """
    assert run(code) == "refused\nrefused\nrefused"


# --- The walls themselves ---


TAKE_DOWN = """
    import ctypes, os
    libc = ctypes.CDLL(None)
    remount, folder, user, mounts = 32 | 4096, b"/usr/lib", 0x10000000, 0x20000
    results = {
        "user": libc.unshare(user),
        "mounts": libc.unshare(mounts),
        "writable": libc.mount(b"none", b"/", None, remount, None),
        "larger": libc.mount(b"none", os.getcwd().encode(), None, 32, b"size=1g"),
        "umount": libc.umount2(folder, 2),
        "bind": libc.mount(b"/usr/lib", b"/tmp", None, 4096, None),
        "tmpfs": libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
        "chroot": libc.chroot(b"."),
        "pivot": libc.pivot_root(b".", b"."),
        "setuid": libc.setuid(1 + os.getuid()),
    }
    print(*(name for name, result in results.items() if result >= 0))
"""


def test_no_wall_can_be_taken_down() -> None:
    needs("files_read_only", "processes_contained")
    assert run(TAKE_DOWN) == ""


def test_mounts_hold_even_where_a_snippet_may_make_namespaces_of_its_own(tmp_path: Path) -> None:
    needs("disk_limited")
    opened = replaced(tmp_path, TAKE_DOWN, "restrict_files", "refuse_calls").split()
    assert not {"writable", "larger", "umount", "setuid"} & set(opened)


def replaced(folder: Path, code: str, *names: str) -> str:
    """Runs the snippet in a child in which functions of these names fail, as on other machines."""
    (folder / "snippet.py").write_text(textwrap.dedent(code))
    program = f"""
        import os, runpy, sys
        names = runpy.run_path({str(RUNNER)!r})
        def fail(*arguments): raise OSError
        names["main"].__globals__.update({{name: fail for name in {names}}})
        sys.argv = ["x", str(os.getppid()), "5", str(1 << 29), "1000", str(1 << 20)]
        names["main"]()
        """
    command = [sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return ended.stdout + ended.stderr


ESCAPES = """
    import os, socket
    def tries(action, *arguments):
        try:
            action(*arguments)
        except OSError:
            return False
        return True
    def fork():
        if os.fork() == 0:
            os._exit(0)
    print("read", tries(open, {file!r}), "write", tries(open, {file!r}, "a"), end=" ")
    print("own", tries(open, "own", "w"))
    print("socket", tries(socket.socket), "fork", tries(fork))
"""


@pytest.mark.parametrize(
    ("missing", "held"),
    [
        (["enter_namespaces"], "read False write False own True\nsocket False fork False\n"),
        (["change_root"], "read False write False own True\nsocket False fork False\n"),
        (
            ["restrict_files", "refuse_calls"],
            "read False write False own True\nsocket True fork True\n",
        ),
    ],
    ids=["no-namespaces", "no-mounts", "neither-landlock-nor-seccomp"],
)
def test_each_wall_holds_where_another_is_missing(
    missing: list[str], held: str, private: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if not all(standing_walls().values()):
        pytest.skip("this machine allows not every wall")
    folder = tmp_path_factory.mktemp("work")
    assert replaced(folder, ESCAPES.replace("{file!r}", repr(str(private))), *missing).startswith(
        held
    )


def test_without_any_wall_the_probe_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(tool: PythonTool, workdir: str, output: IO[bytes]) -> subprocess.Popen[bytes]:
        program = (
            f"import os, runpy, sys; names = runpy.run_path({str(RUNNER)!r})\n"
            "names['main'].__globals__['raise_walls'] = lambda *arguments: None\n"
            "sys.argv = ['x', str(os.getppid()), '5', str(1 << 29), str(1 << 20), str(1 << 20)]\n"
            "names['main']()"
        )
        command = [sys.executable, "-I", "-S", "-u", "-c", program]
        return subprocess.Popen(command, cwd=workdir, stdout=output, start_new_session=True)

    monkeypatch.setattr(PythonTool, "_start", start)
    standing_walls.cache_clear()
    try:
        none = dict.fromkeys(standing_walls(), False)
        assert standing_walls() == {**none, "resources_limited": True}
        assert missing_walls() == list(MISSING.values())
    finally:
        standing_walls.cache_clear()


def test_the_walls_that_matter_are_named_in_words() -> None:
    standing = standing_walls()
    assert missing_walls() == [words for name, words in MISSING.items() if not standing[name]]
    assert standing["resources_limited"]
