"""The launcher's own process: starts programs, ends them with all that they started, reaps them.

    python preload.py FD MODULE ...

It runs under the interpreter that a program's command names, on the standard library alone; with
modules it has imported these, and made the first requests of SDKs (warm_up.py), before the first
program, which is then forked from it in milliseconds. Frames on FD are JSON behind their length; a
start comes with three files (standard input, output and error), carried by a byte before its frame.

    to it      {"id", "argv", "env", "memory_bytes", "open_files", "forks"}      {"kill": id}
    from it    {"ready": {MODULE: error}}    {"id", "pid"} or {"id", "error"}    {"id", "code"}

Invariant: nothing that a program started outlives it: this process adopts orphans and kills them;
nothing here outlives the trainer, whose end closes the socket; and programs die with this process.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from contextlib import suppress
from types import TracebackType
from typing import Any

# Options of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LENGTH = struct.Struct("<I")
# The C library, opened once for all programs.
LIBC = ctypes.CDLL(None)
WARM_UP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "warm_up.py")
# Files whose frames stand before a script's own; newer interpreters freeze runpy.
RUNNERS = (__file__, runpy.__file__, "<frozen runpy>")
# A program's environment names it by this, and what it starts inherits that.
MARK = "PROGRAM_ATTEMPT"
# So often children that start children are looked for again.
MAX_HUNTS = 100
# The longest wait for a signal or a frame, after which the trainer is looked at, in seconds.
LOOK_S = 1.0


class LauncherProcess:
    """Starts and ends programs as the frames on a socket say.

    Args:
        failures: why modules could not be imported, by name.
    """

    def __init__(self, control: socket.socket, failures: dict[str, str]) -> None:
        self.control = control
        self.failures = failures
        self.ids: dict[int, int] = {}
        self.marks: dict[int, str] = {}
        self.parent = os.getppid()

    def run(self) -> None:
        """Serves until the socket is closed, then ends every program."""
        woken, wakes = os.pipe()
        os.set_blocking(woken, False)
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with suppress(OSError, EOFError):
            self.send({"ready": self.failures})
            while os.getppid() == self.parent:
                files = [self.control.fileno(), woken]
                ready, _, _ = select.select(files, [], [], LOOK_S)
                if woken in ready:
                    with suppress(BlockingIOError):
                        os.read(woken, 4096)
                self.reap()
                if self.control.fileno() in ready:
                    self.serve()
        for pid in self.ids:
            kill_family(pid)
        for pid in children(os.getpid()):
            kill_family(pid)

    def serve(self) -> None:
        """Reads a request and does it. Raises EOFError where nobody asks any more."""
        byte, files, _, _ = socket.recv_fds(self.control, 1, 3)
        if not byte:
            raise EOFError
        for file in files:
            os.set_inheritable(file, False)
        (length,) = LENGTH.unpack(self.read(LENGTH.size))
        request = json.loads(self.read(length))
        if "kill" in request:
            for pid, number in self.ids.items():
                if number == request["kill"]:
                    kill_family(pid)
            return
        try:
            pid = os.fork()
        except OSError as error:
            close_all(files)
            self.send({"id": request["id"], "error": os.strerror(error.errno or 1)})
            return
        if pid == 0:
            run_program(request, files, self.control)
        close_all(files)
        self.ids[pid] = request["id"]
        self.marks[pid] = request["env"][MARK]
        self.send({"id": request["id"], "pid": pid})

    def reap(self) -> None:
        """Tells of the programs that have ended, once what they left behind is gone."""
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
            with suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
            self.kill_leftovers()
            self.send({"id": self.ids.pop(pid), "code": code})

    def kill_leftovers(self) -> None:
        """Kills the orphans that belong to no program that still runs."""
        for _ in range(MAX_HUNTS):
            orphans = [pid for pid in children(os.getpid()) if pid not in self.ids]
            leftovers = [pid for pid in orphans if mark_of(pid) not in self.marks.values()]
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
        data = json.dumps(message).encode()
        self.control.sendall(LENGTH.pack(len(data)) + data)


def run_program(request: dict[str, Any], files: list[int], control: socket.socket) -> None:
    """Becomes the program, in a forked child; does not return."""
    code = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, file in enumerate(files):
            os.dup2(file, place)
        limit(request)
        if request["forks"]:
            control.close()
            close_all(files)
            try:
                code = run_script(request["argv"], request["env"])
            finally:
                end_as_interpreter()
        else:
            os.execvpe(request["argv"][0], request["argv"], request["env"])
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_script(argv: list[str], env: dict[str, str]) -> int:
    """Runs a Python file as the main program of this process; returns its exit code."""
    os.environ.clear()
    os.environ.update(env)
    # All programs would draw alike.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as ending:
        if isinstance(ending.code, int):
            return ending.code & 0xFF
        if ending.code is not None:
            print(ending.code, file=sys.stderr)
            return 1
    except Exception as error:
        traceback.print_exception(type(error), error, own_frames(error))
        return 1
    return 0


def own_frames(error: BaseException) -> TracebackType | None:
    """Returns a traceback without its first frames, which run the script; None: it has no more.

    A file that cannot be compiled has none.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in RUNNERS:
        trace = trace.tb_next
    return trace


def end_as_interpreter() -> None:
    """Does what an interpreter does at its end: waits for threads, calls what asked to be called.

    All but taking apart what is loaded, which costs time.
    """
    # Nothing else joins the threads that are no daemons.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def limit(request: dict[str, Any]) -> None:
    """Bounds the memory and the open files of this process, and of what it starts each."""
    bounds = {
        resource.RLIMIT_DATA: request["memory_bytes"],
        resource.RLIMIT_NOFILE: request["open_files"],
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        if most is not None:
            _, hard = resource.getrlimit(kind)
            if hard != resource.RLIM_INFINITY:
                most = min(most, hard)
            resource.setrlimit(kind, (most, most))


def children(pid: int) -> list[int]:
    """Lists the children of a process."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def mark_of(pid: int) -> str:
    """Returns which program a process comes from, as far as its environment says so."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            name, _, value = entry.partition(b"=")
            if name.decode("utf-8", "replace") == MARK:
                return value.decode("utf-8", "replace")
    return ""


def kill_family(pid: int) -> None:
    """Kills a process, its group and all that descends from it.

    They are stopped first, so that none starts others meanwhile.
    """
    stopped: set[int] = set()
    for _ in range(MAX_HUNTS):
        family = family_of(pid)
        if family <= stopped:
            break
        for member in family - stopped:
            with suppress(OSError):
                os.kill(member, signal.SIGSTOP)
        stopped |= family
    for member in stopped:
        with suppress(OSError):
            os.kill(member, signal.SIGKILL)
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


def main() -> None:
    """Imports what is named, then serves."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # A program may have stopped this process, which then sees the trainer's end all the same.
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    control = socket.socket(fileno=int(sys.argv[1]))
    # A program that had it could speak for others, and hold it open behind this process's end.
    control.set_inheritable(False)
    # Modules of the user's are imported from here, and none from beside this file.
    sys.path[0] = os.getcwd()
    failures: dict[str, str] = {}
    for name in sys.argv[2:]:
        try:
            importlib.import_module(name)
        # The trainer says it, and starts no program; a module may be a script that ends.
        except (Exception, SystemExit) as error:
            failures[name] = repr(error)
    if len(sys.argv) > 2:
        runpy.run_path(WARM_UP)["warm_up"]()
    gc.collect()
    # Loaded modules stay shared with the programs.
    gc.freeze()
    LauncherProcess(control, failures).run()


if __name__ == "__main__":
    main()
