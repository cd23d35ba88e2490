"""Tests what holds a snippet that has broken out of its interpreter.

Each way out is tried for real, and fails.
"""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
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


@pytest.mark.seconds
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


# Behind FILE, PID and ADDRESS, a file, a process and a socket of the user's: each changes one of
# them, reads of it, or leaves something behind.
REACHES_OUT = {
    "setxattr": "os.setxattr(FILE, 'user.note', b'changed')",
    "removexattr": "os.removexattr(FILE, 'user.mine')",
    "getxattr": "os.getxattr(FILE, 'user.mine')",
    "setxattrat": "call(463, 463, -100, FILE.encode(), 0, b'user.x', bytes(16), 16)",
    "file_setattr": "call(469, 469, -100, FILE.encode(), bytes(24), 24, 0)",
    "utime": "os.utime(FILE, (1, 1))",
    "times of the interpreter": "os.utime(interpreter())",
    "chown": "os.chown(FILE, -1, os.getgid())",
    "flags": "fcntl.ioctl(interpreter(), 0x80086601, bytes(8))",
    "lease": "fcntl.fcntl(interpreter(), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "watch": "c(libc.inotify_add_watch(c(libc.inotify_init()), FILE.encode(), 2))",
    "page cache": "os.posix_fadvise(interpreter(), 0, 0, os.POSIX_FADV_DONTNEED)",
    "nice": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
    "pinning": "os.sched_setaffinity(PID, {0})",
    "class": "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))",
    "parameters": "os.sched_setparam(PID, os.sched_param(0))",
    "attributes": "call(314, 274, PID, struct.pack('IIQiIQQQ', 48, 3, 0, 0, 0, 0, 0, 0), 0)",
    "ioprio": "call(251, 30, 1, PID, 3 << 13)",
    "autogroup": "open(f'/proc/{PID}/autogroup', 'w').write('19')",
    "pages": "call(256, 238, PID, 64, bytes(8), bytes(8))",
    "trace": "c(libc.ptrace(0x4206, PID, 0, 0))",
    "pidfd": "call(434, 434, PID, 0)",
    "memory": "call(440, 440, 0, bytes(16), 1, 20, 0)",
    "limit": "resource.prlimit(PID, resource.RLIMIT_CPU, (0, 0))",
    "signal by ioctl": "fcntl.ioctl(socket.socketpair()[0], 0x8901, struct.pack('i', PID))",
    "signal by fcntl": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PID)",
    "signal by F_SETOWN_EX": "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, PID))",
    "queue of POSIX": "c(libc.mq_open(b'/walls', os.O_CREAT | os.O_RDWR, 0o600, None))",
    "no queue of POSIX": "c(libc.mq_unlink(b'/walls'))",
    "queue": "c(libc.msgget(KEY, 0o1600))",
    "semaphores": "c(libc.semget(KEY, 1, 0o1600))",
    "shared memory": "c(libc.shmget(KEY, 4096, 0o1600))",
    "shared memory of POSIX": "c(libc.shm_open(b'/walls', os.O_CREAT | os.O_RDWR, 0o600))",
    "key": "call(248, 217, b'user', b'walls', b'x', 1, -5)",
    "datagram": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'out', ADDRESS)",
    "packet": "socket.socketpair(type=socket.SOCK_SEQPACKET)",
    "stream": "socket.socketpair()[0].sendto(b'out', ADDRESS)",
    "message": "socket.socketpair()[0].sendmsg([b'out'], [], 0, ADDRESS)",
    "name": "socket.socketpair()[0].bind(chr(0) + 'walls')",
    "large pipe": "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",
    "caller's end": "c(libc.prctl(1, 0, 0, 0, 0))",
    "caller's end, high bits": "c(libc.prctl(ctypes.c_ulong(1 << 32 | 1), 0, 0, 0, 0))",
    "orphans": "c(libc.prctl(36, 1, 0, 0, 0))",
    "user": "c(libc.setresuid(os.getuid(), os.getuid(), os.getuid()))",
    "session": "os.setsid()",
    "namespace": "c(libc.unshare(0x10000000))",
    "faults": "call(323, 282, 1)",
    "secret memory": "call(447, 447, 0)",
    "operations": "call(206, 0, 1, bytes(8))",
}
TRY_EACH = """
import ctypes, fcntl, os, platform, resource, signal, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
KEY = 0x3a115
def c(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result
def call(x86, arm, *arguments):
    number = arm if platform.machine() == "aarch64" else x86
    return c(libc.syscall(number, *arguments))
def interpreter():
    return os.open(os.__file__, os.O_RDONLY)
for name, code in REACHES_OUT.items():
    try:
        exec(code)
    except OSError:
        pass
    else:
        print(name)
"""
# Without rights beyond those of its user, as the processes of others mostly are.
BYSTANDER = """
import ctypes, struct, time
ctypes.CDLL(None).capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["namespaces", "no namespaces"])
def walls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Has the tool run with all walls, and as where namespaces are forbidden."""
    needs("files_read_only", "processes_contained")
    if request.param == "no namespaces":
        monkeypatch.setattr("features.sandbox.python_tool.PROGRAM", without_namespaces(tmp_path))
    return str(request.param)


def without_namespaces(folder: Path) -> Path:
    """Writes the child's program with namespaces that are forbidden, as in Docker."""
    program = folder / "program.py"
    program.write_text(
        f"import runpy\nnames = runpy.run_path({str(RUNNER)!r})\n"
        "def fail(*arguments): raise OSError\n"
        "names['main'].__globals__['enter_namespaces'] = fail\nnames['main']()\n"
    )
    return program


@pytest.fixture
def bystander() -> Iterator[psutil.Popen]:
    with psutil.Popen([sys.executable, "-c", BYSTANDER], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def objects_of_ipc() -> str:
    return "".join(Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("msg", "sem", "shm"))


def test_a_snippet_changes_nothing_of_the_user_and_leaves_nothing_behind(
    walls: str, bystander: psutil.Popen, tmp_path: Path
) -> None:
    file = tmp_path / "mine"
    file.write_text("mine")
    with contextlib.suppress(OSError):
        os.setxattr(file, "user.mine", b"mine")
    before = file.stat()
    state = (bystander.nice(), bystander.cpu_affinity(), bystander.ionice())
    ipc = objects_of_ipc()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local:
        local.bind(str(tmp_path / "s"))
        names = {
            "FILE": str(file),
            "PID": bystander.pid,
            "ADDRESS": local.getsockname(),
            "REACHES_OUT": REACHES_OUT,
        }
        lines = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        assert run(lines + TRY_EACH) == ""
    assert file.stat() == before
    assert (bystander.nice(), bystander.cpu_affinity(), bystander.ionice()) == state
    assert bystander.poll() is None
    assert objects_of_ipc() == ipc


def test_what_the_standard_library_needs_is_allowed(walls: str) -> None:
    code = """
        import asyncio, ctypes, fcntl, mmap, os, selectors, shutil, signal, socket, tempfile, time
        from concurrent.futures import ThreadPoolExecutor
        async def main():
            return await asyncio.to_thread(sum, [1, 2])
        print(asyncio.run(main()), list(ThreadPoolExecutor(4).map(abs, [-1, -2])))
        ours, theirs = socket.socketpair()
        ours.settimeout(1)
        theirs.send(b'x')
        print(ours.recv(1), mmap.mmap(-1, 10)[0], os.isatty(0), os.cpu_count() > 0)
        signal.signal(signal.SIGALRM, lambda *arguments: print('alarm'))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.1)
        with open('a', 'w') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write('text')
        shutil.copyfile('a', 'b')
        os.link('a', 'c')
        os.symlink('a', 'd')
        print(open('d').read(), os.path.exists('c'), shutil.disk_usage('.').total > 0)
        """
    assert run(code).splitlines() == [
        "3 [1, 2]",
        "b'x' 0 False True",
        "alarm",
        "text True True",
    ]


# A thread is what a snippet shows outside of its walls.
BEHIND_A_THREAD = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None)
threading.Thread(target=time.sleep, args=(60,)).start()
"""
# Each would live on where its caller is killed.
OUTLIVES = {
    "nothing": "",
    "cleared": "libc.prctl(1, 0, 0, 0, 0)",
    "another session": "libc.setsid()",
    "another user": "libc.setfsuid(1); libc.setfsuid(0); libc.setresgid(1, 1, 1)",
    "another program": "libc.execl(b'/bin/sleep', b'sleep', b'60', None)",
    "a child": "libc.fork()",
    "its first thread ended": "libc.syscall(93 if os.uname().machine == 'aarch64' else 60, 0)",
}


@pytest.mark.seconds
@pytest.mark.parametrize("trick", OUTLIVES)
def test_no_snippet_outlives_a_trainer_that_is_killed(
    walls: str, trick: str, tmp_path: Path
) -> None:
    code = f"{BEHIND_A_THREAD}{OUTLIVES[trick]}\ntime.sleep(60)"
    program = "from features.sandbox import python_tool as tool\n"
    if walls == "no namespaces":
        program += f"tool.PROGRAM = {str(tmp_path / 'program.py')!r}\n"
    program += f"tool.PythonTool(timeout_s=60).execute({code!r})"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(RUNNER.parents[2])}
    with psutil.Popen([sys.executable, "-c", program], env=environment) as caller:
        try:
            wait_until(lambda: any(has_threads(child) for child in caller.children(True)))
            # The trick is next.
            time.sleep(0.3)
            below = caller.children(recursive=True)
        finally:
            caller.kill()
    wait_until(lambda: not any(lives(process) for process in below))


def has_threads(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.num_threads() > 1)
    return False


def lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


FOLDERS = {
    "deep": "for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
    "deep with long names": (
        "for _ in range(300):\n    os.mkdir('d' * 255)\n    os.chdir('d' * 255)"
    ),
    "deep with a file at the end": (
        "for _ in range(2000):\n    os.mkdir('d')\n    os.chdir('d')\nopen('a', 'w').close()"
    ),
    "closed": "os.makedirs('a/b/c')\nos.mkdir('a/b/d', 0)\nos.umask(0o777)\nos.mkdir('e')",
    "wide": "for i in range(2000): os.mkdir(str(i))",
    "links": "os.symlink(OUTSIDE, 'a')\nos.symlink('.', 'b')\nos.symlink('no', 'c')",
    "pipes": "os.mkfifo('a', 0)\nos.mkdir('b')\nos.mkfifo('b/c', 0)",
    "names": "for n in range(1, 256):\n    if n not in b'/.': os.mkdir(bytes([n]))",
    "names of ours": "for n in ('1', '2', 'folder'): os.makedirs(n + '/1/2')",
}


@pytest.mark.seconds
@pytest.mark.parametrize("kind", FOLDERS)
def test_no_folder_of_a_snippet_stays(
    kind: str, private: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("files_read_only")
    program = without_namespaces(tmp_path)
    monkeypatch.setattr("features.sandbox.python_tool.PROGRAM", program)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    code = f"OUTSIDE = {str(private.parent)!r}\nimport os\n{FOLDERS[kind]}\nprint('made')"
    assert run(code) == "made"
    assert os.listdir(temporary) == []


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
    def start(tool: PythonTool, workdir: Path, output: IO[bytes]) -> subprocess.Popen[bytes]:
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
