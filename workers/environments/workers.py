"""Env workers: the pool's side of the thread, process or Ray actor where an agent lives.

An env worker runs one agent's calls, one at a time, for the thread that owns it; `kill` and `ran`
may come from another thread. Invariant: a call returns a `StepReply` or raises `WorkerLost`. Ray is
imported only where it is asked for.
"""

import contextlib
import ctypes
import logging
import pickle
import secrets
import threading
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import Any, Literal

import cloudpickle

from custom.env_calls import Abandoned
from data.process_globals import mend_process_globals
from workers.environments.clock import STALE_S, TaskClock
from workers.environments.env_processes import EnvProcess, EnvProcesses
from workers.environments.reply import (
    NUMBER_BITS,
    Call,
    StepReply,
    WorkerLost,
    read_reply,
    split_number,
)
from workers.environments.server import EnvServer, Exchange, SteppedServer

logger = logging.getLogger(__name__)
Isolation = Literal["thread", "process", "ray"]
# So many characters are kept of the error of a Ray actor that ended.
MAX_RAY_ERROR_CHARS = 500
# After so many replies to other calls an env worker's process is given up.
MAX_DROPPED = 100


class EnvWorker(ABC):
    """Keeps one agent and runs its calls.

    Attributes:
        clock: times the running call, as far as that can be seen from here.
        num_dropped: replies that came to no request.
    """

    num_dropped = 0

    def __init__(self) -> None:
        self.clock = TaskClock(STALE_S)

    @abstractmethod
    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs a call of `EnvServer` there and waits for it. Raises WorkerLost.

        A reply that has questions is none yet: the call `answer` goes on with it.
        """

    def set_exchange(self, exchange: Exchange) -> None:  # noqa: B027
        """Says who is handed questions by a worker whose calls run in the thread that calls."""

    def ran(self) -> float:
        """Returns the seconds, on the agent's `TaskClock`, since the running call began.

        0 where its reply waits to be read. May be called from any thread.
        """
        return self.clock.elapsed()

    @abstractmethod
    def kill(self) -> None:
        """Makes a call that hangs end, as far as that can be done.

        May be called from any thread, and never raises.
        """

    def end(self) -> None:
        """Closes the agent and gives the place up.

        A close that fails is logged, and spoils no episode.
        """
        try:
            error = self.call("close", ()).error
        except WorkerLost as lost:
            error = str(lost)
        if error:
            logger.warning("closing an environment failed: %s", error)


class ThreadWorker(EnvWorker):
    """Keeps the agent in the thread that calls.

    What hangs can be asked to stop, which only reaches Python code.
    """

    _thread = 0

    def __init__(self) -> None:
        self._server = EnvServer(STALE_S)
        self.clock = self._server.clock

    def set_exchange(self, exchange: Exchange) -> None:
        """Says who is handed questions: the call itself waits for their answers."""
        self._server.exchange = exchange

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs the call here, in the calling thread."""
        self._thread = threading.get_ident()
        reply = self._server.call(kind, args)
        mended = mend_process_globals()
        if mended:
            logger.warning(
                "code of an environment set %s to what ends the run; it was put back (in a process "
                "of its own it harms itself alone: agent.environment.isolation=process)",
                ", ".join(mended),
            )
        return reply

    def kill(self) -> None:
        """Raises Abandoned in the thread.

        The thread must be alive: the pool's lock and set of slots see to that.
        """
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(self._thread),
            ctypes.py_object(Abandoned),
        )


class ProcessWorker(EnvWorker):
    """Keeps the agent in a process that the fork server forked.

    What the environment starts ends with it.
    """

    def __init__(self, processes: EnvProcesses) -> None:
        super().__init__()
        self._processes = processes
        self._process: EnvProcess | None = None
        self._killed = False
        self._lost = False

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Sends the call to the process, which is forked at the first, and waits for the reply."""
        if self._process is None:
            self._process = self._processes.fork()
        if self._killed:
            raise WorkerLost("killed before it was ready")
        connection = self._process.connection
        try:
            # Before sending: a process that does not read holds up who sends much.
            self.clock.begin(str(self._process.pid))
            # What the environment wrote ahead, looking like a reply, cannot know this.
            number = secrets.randbits(NUMBER_BITS)
            request = (number, kind, args)
            connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            return self._reply_to(number, connection)
        except (EOFError, OSError):
            self._lost = True
            how = self._process.reap()
            raise WorkerLost(f"the environment's process ended during {kind} ({how})") from None
        finally:
            self.clock.end()

    def _reply_to(self, number: int, connection: Connection) -> StepReply:
        """Waits for the reply to a request, and drops others. Raises WorkerLost."""
        for _ in range(MAX_DROPPED):
            answered, reply = split_number(connection.recv_bytes())
            if answered == number:
                return read_reply(reply)
            self.num_dropped += 1
        raise WorkerLost(f"the environment's process sent {MAX_DROPPED} replies to other calls")

    def ran(self) -> float:
        """Returns the seconds on the clock of the process's first thread; 0 before the call."""
        # The connection may be closed meanwhile.
        with contextlib.suppress(OSError):
            if self._process is not None and not self._process.connection.poll(0):
                return super().ran()
        return 0.0

    def kill(self) -> None:
        """Kills the process with whatever it started."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        """Closes the agent and ends the process."""
        if self._process is None:
            return
        if not self._lost:
            super().end()
        self._process.reap()
        self._process.connection.close()


class RayWorker(EnvWorker):
    """Keeps the agent in a Ray actor, on whichever node has room; it takes no CPU of Ray's count.

    The actor may be on another machine, so that its calls are timed by the wall's clock.
    """

    _actor: Any = None

    def __init__(self, asks_player: bool = False) -> None:
        super().__init__()
        self._server_class = SteppedServer if asks_player else EnvServer

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Calls the actor, which is made at the first call, and waits for the reply."""
        import ray

        try:
            if self._actor is None:
                make_actor = ray.remote(num_cpus=0)(self._server_class)
                self._actor = make_actor.remote()
            self.clock.begin(None)
            return read_reply(ray.get(self._actor.answer.remote(kind, args)))
        # Ray's own errors have many classes.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:MAX_RAY_ERROR_CHARS]
            raise WorkerLost(f"the environment's Ray actor ended during {kind}: {why}") from None

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


def make_worker(kind: Isolation, processes: EnvProcesses, asks_player: bool) -> EnvWorker:
    """Makes an env worker of that kind; its process or actor starts with the first call.

    Args:
        asks_player: its agent may ask who plays the episode.
    """
    if kind == "process":
        return ProcessWorker(processes)
    if kind == "ray":
        return RayWorker(asks_player)
    return ThreadWorker()


def pickled(spec: Any) -> bytes:
    """Pickles the spec for another process, also what a script or a notebook defines."""
    try:
        return cloudpickle.dumps(spec)
    # Objects refuse in many ways.
    except Exception as error:
        raise ValueError(
            f"{type(error).__name__}: {error}: an environment that cannot be pickled lives in a "
            "thread only (isolation=thread), or is given by name or as a function that makes it"
        ) from error
