"""Env workers: where an agent and its environment live, a thread of this process, a process of its own, or a Ray actor.

An env worker builds one agent and runs its calls, one at a time, for the thread that owns it; `kill` may come from
another thread. Invariant: user code never raises into the pool: a call comes back as a `StepReply`, and a worker that
is gone raises `WorkerLost`. Nothing here imports torch, and Ray only where it is asked for.
"""

import contextlib
import ctypes
import importlib
import logging
import pickle
import threading
import time
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, Literal, Protocol

from custom.confine import kill_tree
from custom.env import Abandoned
from data.texts import say
from workers.environments.env_server import Call, EnvServer, StepReply, own_clock, unpack
from workers.environments.fork_server import ForkServer, WorkerLost

Isolation = Literal["thread", "process", "ray"]


class EnvWorker(Protocol):
    """Is the place where one agent lives."""

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs a call of `EnvServer` there and waits for it. Raises WorkerLost."""

    def ran(self) -> float:
        """Returns the seconds, on its `own_clock`, since the running call began, 0 where its reply waits to be read.

        From any thread.
        """

    def kill(self) -> None:
        """Makes a call that hangs end, as far as that can be done; from any thread, and never raises."""

    def end(self) -> None:
        """Closes the agent and gives the place up; a close that fails spoils no episode, but is said."""
        try:
            error = self.call("close", ()).error
        except WorkerLost as lost:
            error = str(lost)
        if error:
            logging.getLogger(__name__).warning("closing an environment failed: %s", error)


def pickled(spec: Any) -> bytes:
    """Pickles the spec for another process.

    cloudpickle, where installed, also takes what a script or a notebook defines.
    """
    pickler = importlib.import_module("cloudpickle" if find_spec("cloudpickle") else "pickle")
    try:
        return pickler.dumps(spec)
    # Objects refuse in many ways.
    except Exception as error:
        raise ValueError(say("not_pickled", kind=type(error).__name__, error=error)) from error


class ThreadWorker(EnvWorker):
    """Keeps the agent in the thread that calls; what hangs can be asked to stop, which only reaches Python code."""

    _thread, _task, _began = 0, "", 0.0

    def __init__(self) -> None:
        self._server = EnvServer()

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs the call here, in the calling thread."""
        self._thread, self._task = threading.get_ident(), f"self/task/{threading.get_native_id()}"
        self._began = own_clock(self._task)
        return self._server.call(kind, args)

    def ran(self) -> float:
        """Returns the seconds on the thread's clock."""
        return own_clock(self._task) - self._began

    def kill(self) -> None:
        """Raises Abandoned in the thread, which must be alive: the pool's lock and set of slots see to that."""
        thread, exception = ctypes.c_ulong(self._thread), ctypes.py_object(Abandoned)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)


class ProcessWorker(EnvWorker):
    """Keeps the agent in a process that the fork server forked; what the environment starts ends with it."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._connection: Connection | None = None
        self._pid: int | None = None
        self._killed = False
        self._began: float | None = None
        # Nobody signals a process id that has been given back.
        self._lock = threading.Lock()

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Sends the call to the process, which is forked at the first, and waits for the reply."""
        if self._connection is None:
            self._pid, self._connection = self._fork_server.fork()
        if self._killed:
            raise WorkerLost("killed before it was ready")
        try:
            # A home that does not read holds up who sends much.
            self._began = own_clock(str(self._pid))
            self._connection.send_bytes(pickle.dumps((kind, args), pickle.HIGHEST_PROTOCOL))
            return unpack(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerLost(f"the environment's process ended during {kind} ({self._release()})") from None
        finally:
            self._began = None

    def ran(self) -> float:
        """Returns the seconds on the clock of the process's first thread; 0 also before a call is sent."""
        began, connection = self._began, self._connection
        with contextlib.suppress(OSError):
            if began is not None and connection is not None and not connection.poll(0):
                return own_clock(str(self._pid)) - began
        return 0.0

    def kill(self) -> None:
        """Kills the process with whatever it started."""
        with self._lock:
            self._killed = True
            if self._pid is not None:
                kill_tree(self._pid)

    def end(self) -> None:
        """Closes the agent and ends the process."""
        if self._pid is not None:
            super().end()
        self._release()
        if self._connection is not None:
            self._connection.close()

    def _release(self) -> str:
        """Gives the process id back; says how the process ended."""
        with self._lock:
            pid, self._pid = self._pid, None
        return "" if pid is None else self._fork_server.reap(pid)


class RayWorker(EnvWorker):
    """Keeps the agent in a Ray actor, on whichever node has room; it takes no CPU of Ray's count."""

    _actor: Any = None
    _began = 0.0

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Calls the actor, which is made at the first call, and waits for the reply."""
        import ray

        try:
            if self._actor is None:
                self._actor = ray.remote(num_cpus=0)(EnvServer).remote()
            self._began = time.monotonic()
            return unpack(ray.get(self._actor.answer.remote(kind, args)))
        # Ray's own errors have many classes.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise WorkerLost(f"the environment's Ray actor ended during {kind}: {why[:500]}") from None

    def ran(self) -> float:
        """Returns the wall clock's seconds: the actor may be on another machine."""
        return time.monotonic() - self._began

    def kill(self) -> None:
        """Kills the actor."""
        import ray

        if self._actor is not None and ray.is_initialized():
            # It may be gone already, or Ray is going.
            with contextlib.suppress(Exception):
                ray.kill(self._actor)

    def end(self) -> None:
        """Closes the agent and kills the actor."""
        if self._actor is not None:
            super().end()
        self.kill()


def make_worker(kind: Isolation, fork_server: ForkServer) -> EnvWorker:
    """Makes an env worker of that kind; its process or actor starts with the first call."""
    return ProcessWorker(fork_server) if kind == "process" else RayWorker() if kind == "ray" else ThreadWorker()
