"""The fork server's own process: it imports modules once, then forks children, ends and reaps them.

    python fork_server_process.py ARGUMENTS          (JSON, see `main`)

It runs under any interpreter, on the standard library alone. Its child file has a function
`run(request, files) -> exit code`, which a forked child calls, and may have `prepare(modules)`,
which is called once, behind the imports. Frames on the control socket are JSON behind their length;
a byte before each frame of a request carries the files of a start.

    to it      {"id", "mark", "request"}    {"kill": id}
    from it    {"ready": {MODULE: error}}   {"id", "pid"} or {"id", "error"}   {"id", "code"}

Each child has a keeper between this process and itself, its parent, which ends as it ends:

    this process  --fork-->  keeper  --fork-->  child

Invariant: nothing that a child started outlives it: this process adopts orphans and kills them. A
mark is an entry NAME=VALUE of the environment of what a child starts, by which an orphan is known
to belong to a child that still runs. Nothing here outlives the process that started it, whose end
closes the socket; and children die with this process.
"""

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

# Options of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LENGTH = struct.Struct("<I")
# The C library, opened once for all children.
LIBC = ctypes.CDLL(None)
# Linux lists children here, unless its kernel was built without that.
LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")
# Files that may come with a start.
MAX_FILES = 8
# A process id has no more digits.
MAX_PID_CHARS = 20
# So often children that start children are looked for again.
MAX_HUNTS = 100
# So often the environment of a process is read that shows none, and the wait between, in seconds.
MAX_LOOKS = 5
LOOK_AGAIN_S = 0.002
# The longest wait for a signal or a frame, after which the parent is looked at, in seconds.
LOOK_S = 1.0


class ForkServerProcess:
    """Forks and ends children as the frames on a socket say.

    Args:
        control: the socket.
        child: the module of the child file.
        failures: why modules could not be imported, by name.
    """

    def __init__(self, control: socket.socket, child: ModuleType, failures: dict[str, str]) -> None:
        self.control = control
        self.child = child
        self.failures = failures
        # By process ids of the keepers of the children that run; a group is the child's.
        self.ids: dict[int, int] = {}
        self.marks: dict[int, str] = {}
        self.groups: dict[int, int] = {}
        self.pid = os.getpid()
        self.parent = os.getppid()
        self.woken, self.wakes = os.pipe()

    def run(self) -> None:
        """Serves until the socket is closed, then ends every child."""
        os.set_blocking(self.woken, False)
        os.set_blocking(self.wakes, False)
        signal.set_wakeup_fd(self.wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with suppress(OSError, EOFError):
            self.send({"ready": self.failures})
            while os.getppid() == self.parent:
                files = [self.control.fileno(), self.woken]
                ready, _, _ = select.select(files, [], [], LOOK_S)
                if self.woken in ready:
                    with suppress(BlockingIOError):
                        os.read(self.woken, 4096)
                self.reap()
                if self.control.fileno() in ready:
                    self.serve()
        for pid in self.ids:
            kill_family(pid)
            kill_group(self.groups[pid])
        for pid in children(self.pid):
            kill_family(pid)

    def serve(self) -> None:
        """Reads a request and does it. Raises EOFError where nobody asks any more."""
        byte, files, _, _ = socket.recv_fds(self.control, 1, MAX_FILES)
        if not byte:
            raise EOFError
        for file in files:
            os.set_inheritable(file, False)
        (length,) = LENGTH.unpack(self.read(LENGTH.size))
        message = json.loads(self.read(length))
        if "kill" not in message:
            self.start(message, files)
            return
        for pid, number in self.ids.items():
            if number == message["kill"]:
                kill_family(pid, spares_first=True)
                kill_group(self.groups[pid])
                # The keeper ends as its child did, unless the child has stopped it.
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)

    def start(self, message: dict[str, Any], files: list[int]) -> None:
        """Forks a keeper, which forks a child; neither returns from here.

        So a child that ends, or stops, its parent hits its own keeper and no other child.
        """
        told, tells = os.pipe()
        try:
            keeper = os.fork()
        except OSError as error:
            close_all([*files, told, tells])
            self.send({"id": message["id"], "error": os.strerror(error.errno or 1)})
            return
        if keeper == 0:
            os.close(told)
            self.become_keeper(message["request"], files, tells)
        close_all([*files, tells])
        # One word, or none from a keeper that could not fork.
        pid = int(os.read(told, MAX_PID_CHARS) or 0)
        os.close(told)
        if pid == 0:
            self.send({"id": message["id"], "error": "its keeper could not fork"})
            return
        self.ids[keeper] = message["id"]
        self.marks[keeper] = message["mark"]
        self.groups[keeper] = pid
        self.send({"id": message["id"], "pid": pid})

    def become_keeper(self, request: dict[str, Any], files: list[int], tells: int) -> NoReturn:
        """Forks a child, says its process id, waits for it, and ends as it ended."""
        try:
            self.leave_fork_server()
            keeper = os.getpid()
            pid = os.fork()
            if pid == 0:
                os.close(tells)
                self.become_child(request, files, keeper)
            os.write(tells, str(pid).encode())
            close_all([*files, tells])
            _, status = os.waitpid(pid, 0)
            end_as(os.waitstatus_to_exitcode(status))
        except OSError:
            pass
        finally:
            os._exit(1)

    def become_child(self, request: dict[str, Any], files: list[int], keeper: int) -> NoReturn:
        """Does what the child file says, in a session of its own, and ends without cleaning up."""
        code = 1
        try:
            end_with(keeper)
            draw_anew()
            code = self.child.run(request, files)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            # Not through the frames of the fork server.
            os._exit(code)

    def leave_fork_server(self) -> None:
        """Parts a forked keeper from what is the fork server's."""
        end_with(self.pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.control.close()
        close_all([self.woken, self.wakes])

    def reap(self) -> None:
        """Tells of the children that have ended, once what they left behind is gone."""
        ended: dict[int, int] = {}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self.ids:
                    ended[pid] = os.waitstatus_to_exitcode(status)
        for pid, code in ended.items():
            del self.marks[pid]
            kill_group(pid)
            kill_group(self.groups.pop(pid))
            self.kill_leftovers()
            self.send({"id": self.ids.pop(pid), "code": code})

    def kill_leftovers(self) -> None:
        """Kills the orphans that belong to no child that still runs."""
        marks = set(self.marks.values())
        for _ in range(MAX_HUNTS):
            orphans = [pid for pid in children(self.pid) if pid not in self.ids]
            leftovers = [pid for pid in orphans if not marks & settled_environment_of(pid)]
            if not leftovers:
                return
            for pid in leftovers:
                kill_family(pid)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def read(self, length: int) -> bytes:
        """Reads so many bytes of a frame."""
        data = b""
        while len(data) < length:
            block = self.control.recv(length - len(data))
            if not block:
                raise EOFError
            data += block
        return data

    def send(self, message: dict[str, Any]) -> None:
        """Sends a frame."""
        self.control.sendall(frame_of(message))


def end_with(parent: int) -> None:
    """Moves this process to a session of its own, and has it end when its parent ends."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before that took effect.
    if os.getppid() != parent:
        os._exit(1)


def end_as(code: int) -> NoReturn:
    """Ends this process with an exit code, or by the signal that a negative one names."""
    if code < 0:
        # The child has left a core file, where those are wanted.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def frame_of(message: dict[str, Any]) -> bytes:
    """Returns a message as it travels: JSON behind its length."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def draw_anew() -> None:
    """Seeds this process by the system: all children would draw alike."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def children(pid: int) -> list[int]:
    """Lists the children of a process."""
    found: list[int] = []
    if not LISTS_CHILDREN:
        # Whoever lacks psutil is left with groups of processes.
        with suppress(Exception):
            psutil = importlib.import_module("psutil")
            found += [child.pid for child in psutil.Process(pid).children()]
        return found
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def environment_of(pid: int) -> set[str]:
    """Returns the entries NAME=VALUE of the environment with which a process was started."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        entries = file.read().decode("utf-8", "replace").split("\0")
        return {entry for entry in entries if entry}
    return set()


def settled_environment_of(pid: int) -> set[str]:
    """Returns `environment_of` a process, for which a program that just begins is waited for.

    Between its start and its first instruction Linux shows no entry.
    """
    for _ in range(MAX_LOOKS):
        entries = environment_of(pid)
        if entries:
            return entries
        time.sleep(LOOK_AGAIN_S)
    return set()


def kill_family(pid: int, *, spares_first: bool = False) -> None:
    """Kills a process, its group and all that descends from it.

    They are stopped first, so that none starts others meanwhile.

    Args:
        spares_first: only what descends from the process is killed.
    """
    spared = {pid} if spares_first else set()
    stopped: set[int] = set()
    for _ in range(MAX_HUNTS):
        family = family_of(pid) - spared
        if family <= stopped:
            break
        for member in family - stopped:
            with suppress(OSError):
                os.kill(member, signal.SIGSTOP)
        stopped |= family
    for member in stopped:
        with suppress(OSError):
            os.kill(member, signal.SIGKILL)
    if not spares_first:
        kill_group(pid)


def kill_group(pid: int) -> None:
    """Kills the group that a process leads or led, where one is left."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def family_of(pid: int) -> set[int]:
    """Returns a process and all that descends from it."""
    family = {pid}
    parents = [pid]
    while parents:
        found = set(children(parents.pop())) - family
        family |= found
        parents += found
    return family


def close_all(files: list[int]) -> None:
    """Closes files by their numbers."""
    for file in files:
        os.close(file)


def prctl(option: int, value: int) -> None:
    """Sets an option of this process, on Linux."""
    if sys.platform == "linux":
        LIBC.prctl(option, value)


def load(file: str) -> ModuleType:
    """Loads a module from its file, whatever the path of modules is."""
    spec = importlib.util.spec_from_file_location(os.path.basename(file)[: -len(".py")], file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Imports what is named, then serves.

    The arguments are a JSON object:
        control_fd: the number of the control socket.
        child_file: the file that says what a child does.
        path: the path of modules; null: the interpreter's own, behind the working directory.
        modules: imported beforehand.
    """
    arguments = json.loads(sys.argv.pop())
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A child may have stopped this process, which then sees its parent's end all the same.
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    control = socket.socket(fileno=arguments["control_fd"])
    # A child that had it could speak for others, and hold it open behind this process's end.
    control.set_inheritable(False)
    # None from beside this file.
    sys.path[0] = os.getcwd()
    if arguments["path"] is not None:
        sys.path[:] = arguments["path"]
    failures: dict[str, str] = {}
    for name in arguments["modules"]:
        try:
            importlib.import_module(name)
        # Whoever asked for it says so; a module may be a script that ends.
        except (Exception, SystemExit) as error:
            failures[name] = repr(error)
    child = load(arguments["child_file"])
    if "prepare" in vars(child):
        child.prepare(arguments["modules"])
    gc.collect()
    # Loaded modules stay shared with the children.
    gc.freeze()
    ForkServerProcess(control, child, failures).run()


if __name__ == "__main__":
    main()
