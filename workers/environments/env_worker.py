"""Where agents and their environments live: a thread of this process, a process of its own, or a Ray actor.

A home builds one agent and runs its calls, one at a time, for the thread that owns the home; `kill` may come from another
thread. Invariant: user code never raises into the pool: what it raises comes back as an Outcome with an error, and a
home that is gone raises `HomeLost`. Nothing here imports torch, and Ray only where it is asked for.

    pool's process                     nursery                      a home
    ProcessHome.call  <---- socket pair: pickled calls and outcomes ---->  Host.serve
    Nursery.fork      ---- one end of it ---->  fork  ------------------>

The nursery is a small process that has imported what every agent needs, and forks homes in milliseconds. Homes die with
it, and it ends its homes and itself when the pool's process is gone, even by SIGKILL. It is ours and not
multiprocessing's "forkserver", which imports the main script, with its torch, in every child.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from custom.adapters import library_of
from custom.env import Abandoned

Isolation = Literal["thread", "process", "ray"]
Turn = tuple[list[dict[str, Any]], float, bool, dict[str, Any]]

MAX_ERROR_CHARS = 2_000
PR_SET_PDEATHSIG = 1
REQUEST = struct.Struct("!ci")  # to the nursery: verb and process id
ANSWER = struct.Struct("!i")  # from it: a process id, or an exit code
REAP_S = 1.0
NURSERY_S = 60.0  # the longest that the nursery may take to answer; its start is slow on a busy machine
NURSERY = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
NURSERY += "from workers.environments.env_worker import run_nursery; run_nursery(int(sys.argv[2]), sys.argv[3:])"


class HomeLost(RuntimeError):
    """The home is gone, with the agent in it."""


class Outcome(NamedTuple):
    """What a call gave: a value, or the text of an error; and its own time."""

    value: Any
    error: str
    seconds: float


class Home(Protocol):
    """One agent's home."""

    def call(self, kind: str, args: tuple[Any, ...]) -> Outcome:
        """Runs a call of `Host` in the home and waits for it. Raises HomeLost."""

    def kill(self) -> None:
        """Makes a call that hangs end, as far as that can be done; from any thread, and never raises."""

    def end(self) -> None:
        """Closes the agent and gives the home up."""


def describe(error: BaseException) -> str:
    """The error in one line, then the last lines of its traceback; never longer than MAX_ERROR_CHARS."""
    lines = traceback.format_exception(error, limit=-4)
    text = f"{lines[-1].strip()}\n{''.join(lines[:-1])}".strip()
    return text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 4] + " ..."


def tool_calls(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All of a step's info that leaves the home: the records of its tool calls, those that are well formed."""
    calls = info.get("tool_calls")
    kinds = {"name": str, "ok": bool, "error_kind": str, "seconds": float | int}
    return [
        {name: call[name] for name in kinds}
        for call in (calls if isinstance(calls, list | tuple) else ())
        if isinstance(call, Mapping) and all(isinstance(call.get(name), kind) for name, kind in kinds.items())
    ]


class Host:
    """An agent, where it lives, and the calls that reach it."""

    def __init__(self) -> None:
        self.agent: Any = None

    def call(self, kind: str, args: tuple[Any, ...]) -> Outcome:
        """Runs one call; whatever it raises, SystemExit and KeyboardInterrupt included, becomes the outcome's error."""
        started = time.perf_counter()
        try:
            return Outcome(getattr(self, kind)(*args), "", time.perf_counter() - started)
        except BaseException as error:
            return Outcome(None, describe(error), time.perf_counter() - started)

    def build(self, spec: Any) -> list[dict[str, Any]] | None:
        """Makes the agent from its spec, pickled or not; gives its tool schemas."""
        spec = pickle.loads(spec) if isinstance(spec, bytes) else spec
        self.agent = spec.build()
        return self.agent.tool_schemas

    def reset(self, seed: int) -> Turn:
        """An episode's first messages, in the form of a turn."""
        return self.agent.reset(seed), 0.0, False, {}

    def step(self, text: str) -> Turn:
        """A turn."""
        messages, reward, done, info = self.agent.step(text)
        return messages, float(reward), bool(done), {"tool_calls": tool_calls(info)}

    def finish(self, ending: str) -> Turn:
        """The episode's own reward, where there is one, in the form of a turn."""
        reward = self.agent.episode_reward(ending)
        return [], 0.0 if reward is None else float(reward), True, {"has_reward": reward is not None}

    def close(self) -> None:
        """Closes the agent, if there is one."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.close()

    def answer(self, kind: str, args: tuple[Any, ...]) -> bytes:
        """`call` with a pickled outcome; one that does not pickle is an error of the environment."""
        outcome = self.call(kind, args)
        try:
            return pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
        except BaseException as error:
            text = f"what {kind} returned cannot be sent to another process: {describe(error)}"
            return pickle.dumps(Outcome(None, text[:MAX_ERROR_CHARS], outcome.seconds))

    def serve(self, connection: Connection) -> None:
        """Answers calls until the agent is closed or nobody is there to ask."""
        kind = ""
        while kind != "close":
            try:
                kind, args = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                self.call("close", ())
                return
            connection.send_bytes(self.answer(kind, args))


def pickled(spec: Any) -> bytes:
    """The spec for another process; cloudpickle, where it is installed, also takes what a script or a notebook defines."""
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        return pickler.dumps(spec)
    except Exception as error:  # objects refuse in many ways
        raise ValueError(
            f"{type(error).__name__}: {error}: an environment that cannot be pickled lives in a thread only "
            "(isolation=thread), or is given by name or as a function that makes it"
        ) from error


def unpack(answer: bytes) -> Outcome:
    """The outcome that `Host.answer` packed."""
    try:
        return pickle.loads(answer)
    except BaseException as error:  # a user's object may refuse to be built here
        return Outcome(None, f"what was returned cannot be read in this process: {describe(error)}", 0.0)


def close_agent(home: Home) -> None:
    """A close that fails spoils no episode, but is said."""
    try:
        error = home.call("close", ()).error
    except HomeLost as lost:
        error = str(lost)
    if error:
        logging.getLogger(__name__).warning("closing an environment failed: %s", error)


class ThreadHome:
    """The agent lives in the thread that calls; what hangs can be asked to stop, which only reaches Python code."""

    def __init__(self) -> None:
        self._host = Host()
        self._thread = 0

    def call(self, kind: str, args: tuple[Any, ...]) -> Outcome:
        self._thread = threading.get_ident()
        return self._host.call(kind, args)

    def kill(self) -> None:
        """The thread must be alive: the pool's lock and set of slots see to that."""
        thread, exception = ctypes.c_ulong(self._thread), ctypes.py_object(Abandoned)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)

    def end(self) -> None:
        close_agent(self)


class ProcessHome:
    """The agent lives in a process that the nursery forked, with a process group of its own."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._connection: Connection | None = None
        self._pid: int | None = None
        self._killed = False
        self._lock = threading.Lock()  # nobody signals a process id that has been given back

    def call(self, kind: str, args: tuple[Any, ...]) -> Outcome:
        if self._connection is None:
            self._pid, self._connection = self._nursery.fork()
        if self._killed:
            raise HomeLost("killed before it was ready")
        try:
            self._connection.send_bytes(pickle.dumps((kind, args), pickle.HIGHEST_PROTOCOL))
            return unpack(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise HomeLost(f"the environment's process ended during {kind} ({self._release()})") from None

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._pid is not None:
                signal_group(self._pid)

    def end(self) -> None:
        if self._pid is not None:
            close_agent(self)
        self._release()
        if self._connection is not None:
            self._connection.close()

    def _release(self) -> str:
        with self._lock:
            pid, self._pid = self._pid, None
        return "" if pid is None else self._nursery.reap(pid)


class RayHome:
    """The agent lives in a Ray actor, on whichever node has room; it takes no CPU of Ray's count."""

    def __init__(self) -> None:
        self._actor: Any = None

    def call(self, kind: str, args: tuple[Any, ...]) -> Outcome:
        import ray

        try:
            if self._actor is None:
                self._actor = ray.remote(num_cpus=0)(Host).remote()
            return unpack(ray.get(self._actor.answer.remote(kind, args)))
        except Exception as error:  # Ray's own errors have many classes
            why = f"{type(error).__name__}: {error}"
            raise HomeLost(f"the environment's Ray actor ended during {kind}: {why[:500]}") from None

    def kill(self) -> None:
        import ray

        actor = self._actor
        if actor is not None and ray.is_initialized():
            with contextlib.suppress(Exception):  # gone already, or Ray is going
                ray.kill(actor)

    def end(self) -> None:
        if self._actor is not None:
            close_agent(self)
        self.kill()


def make_home(isolation: Isolation, nursery: Nursery) -> Home:
    """A home of that kind; its process or actor starts with the first call."""
    if isolation == "process":
        return ProcessHome(nursery)
    return RayHome() if isolation == "ray" else ThreadHome()


def signal_group(pid: int) -> None:
    """Kills a home with whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: PermissionError of a group of zombies
        os.killpg(pid, signal.SIGKILL)


class Nursery:
    """The pool's side of the nursery; the process starts with the first home, and again should it have died."""

    def __init__(self, preload: Sequence[str] = ()) -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def fork(self) -> tuple[int, Connection]:
        """A new home's process id, and the connection to it. Raises HomeLost."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            pid = None
            for _ in range(2):  # a nursery that died is only noticed by asking it
                if self._process is None or self._process.poll() is not None:
                    self._start()
                pid = self._ask(b"F", 0, [theirs.fileno()])
                if pid is not None:
                    break
        if pid is None or pid <= 0:
            ours.close()
            raise HomeLost(f"no process for an environment: {os.strerror(-pid) if pid else 'the nursery died'}")
        return pid, Connection(ours.detach())

    def reap(self, pid: int) -> str:
        """Kills the home and its group if they live, and says how it ended."""
        with self._lock:
            code = self._ask(b"R", pid, [])
        if code is None:
            return "with the process that forked it"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def stop(self) -> None:
        """Ends the nursery, and with it every home that is left."""
        with self._lock:
            process, control, self._process, self._control = self._process, self._control, None, None
        if process is not None and control is not None:
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)  # close alone is not seen where a forked process holds a copy
            control.close()
            try:
                process.wait(NURSERY_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(NURSERY_S)
        with theirs:
            command = [sys.executable, "-c", NURSERY, json.dumps(sys.path), str(theirs.fileno()), *self._preload]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def _ask(self, verb: bytes, pid: int, files: list[int]) -> int | None:
        if self._control is None or self._process is None:
            return None
        try:
            socket.send_fds(self._control, [REQUEST.pack(verb, pid)], files)
            answer = self._control.recv(ANSWER.size, socket.MSG_WAITALL)
        except OSError:
            answer = b""
        if len(answer) == ANSWER.size:
            return ANSWER.unpack(answer)[0]
        self._process.kill()  # an answer that comes late would be taken for the next one's
        self._process.wait()
        return None


def libraries_of(sources: Iterable[Any]) -> list[str]:
    """The libraries behind environments named `library:ID`."""
    return sorted({library for source in sources if (library := library_of(source))})


def run_nursery(control_fd: int, preload: Sequence[str]) -> None:
    """The nursery's main loop: forks and reaps until the pool's process is gone. It never runs user code."""
    parent, homes = os.getppid(), set[int]()
    control = socket.socket(fileno=control_fd)
    for name in ("custom.agent", "cloudpickle", *preload):
        with contextlib.suppress(Exception):  # a home that needs it says what is wrong
            importlib.import_module(name)
    gc.freeze()  # what is loaded stays shared between the homes
    while os.getppid() == parent:
        if not select.select([control], [], [], 1.0)[0]:
            continue
        request, files, _, _ = socket.recv_fds(control, REQUEST.size, 1)
        if len(request) < REQUEST.size:
            break
        verb, pid = REQUEST.unpack(request)
        if verb == b"F":
            answer = fork_home(control, files[0])
            homes.add(answer)
        else:
            answer = reap_home(pid)
            homes.discard(pid)
        control.sendall(ANSWER.pack(answer))
    for pid in homes:
        if pid > 0:
            reap_home(pid)


def fork_home(control: socket.socket, connection_fd: int) -> int:
    """In the nursery: the new home's process id, or minus the error number."""
    nursery = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(connection_fd)
        return -(error.errno or 1)
    if pid == 0:
        try:
            run_home(control, connection_fd, nursery)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)  # not through the nursery's frames
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # here and in the home: whoever comes first
    os.close(connection_fd)
    return pid


def run_home(control: socket.socket, connection_fd: int, nursery: int) -> None:
    """In the home: serves one agent."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != nursery:
        return
    control.close()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    np.random.seed()  # or all homes would draw alike
    Host().serve(Connection(connection_fd))
    sys.stdout.flush()


def reap_home(pid: int) -> int:
    """In the nursery: a home's exit code, negative for a signal; it is killed if it lives."""
    signal_group(pid)
    end = time.monotonic() + REAP_S
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return -signal.SIGKILL
