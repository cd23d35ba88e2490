"""Where an agent and its environment live: a thread of this process, a process of its own, or a Ray actor; both sides.

In such a home an `EnvServer` holds the agent and answers the calls that reach it, each with a `StepReply`. An env
worker is the pool's side: it runs one home's calls, one at a time, for the thread that owns it; `kill` may come from
another thread. Processes are forked in milliseconds by the fork server, a small one that has imported what every agent
needs:

    pool's process                       fork server                   an env worker's process
    ProcessWorker.call  <---- socket pair: pickled calls, JSON replies ---->  EnvServer.serve
    ForkServer.fork     ---- one end of it ---->  fork  --------------->

They die with it, and it ends them and itself when the pool's process is gone, even by SIGKILL. It is ours and not
multiprocessing's "forkserver", which imports the main script, with its torch, in every child. It never runs user code.

Invariant: user code never raises out of an `EnvServer` or into the pool: whatever a call did, a `StepReply` comes back,
and a worker that is gone raises `WorkerLost`. Of a step's `info` only numbers and the records of tool calls leave the
home. Nothing here imports torch, and Ray only where it is asked for.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from numbers import Real
from subprocess import DEVNULL, Popen
from typing import Any, Literal

import cloudpickle
import numpy as np
import psutil
from pydantic import TypeAdapter

from custom.adapters import library_of
from custom.agent import Trial, play_trial
from custom.confine import Limits, adopt_orphans, confine, die_with_parent, kill_tree
from custom.env import (
    MAX_ERROR_CHARS,
    Abandoned,
    Message,
    Task,
    check_observation,
    check_reward,
    describe,
)
from data.texts import say

Call = Literal["build", "trial", "reset", "step", "finish", "close"]
Failure = Literal["", "env_crash", "env_timeout"]
# Of a step's info.
MAX_NUMBERS, MAX_NAME_CHARS = 32, 64
Isolation = Literal["thread", "process", "ray"]
# The longest that a killed process may take to end.
REAP_S = 1.0
# The longest that the fork server may take to answer; its start is slow on a busy machine.
ANSWER_S = 60.0
START = "import json, sys; sys.path[:], *own = json.loads(sys.argv[1]); "
START += "from workers.environments.env_server import run_fork_server; run_fork_server(*own)"


@dataclass(frozen=True, kw_only=True)
class StepReply:
    """Holds what came of one call: it is made where the environment lives, and read by the turn loop.

    Attributes:
        messages: what the conversation goes on with.
        reward: of a step; of a finish the episode's own, None where the environment's rewards stand.
        done: the environment has ended.
        tool_calls: name, ok, error_kind and seconds of each.
        info: the numbers of a step's info.
        anchor: `environment.anchor()`, the state that the next turn begins in; None where the class has none.
        tools: of a build, the tools' schemas.
        trial: of a trial, what was seen.
        failure: the episode is over and its environment gone.
        error: why, in one line and the traceback's last ones.
        seconds: the call's own time, in which it computed or waited for something of its own; not that in which it
            waited for its turn, or for a processor.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    info: dict[str, float] = field(default_factory=dict)
    anchor: str | None = None
    tools: list[dict[str, Any]] | None = None
    trial: Trial | None = None
    failure: Failure = ""
    error: str = ""
    seconds: float = 0.0


REPLY = TypeAdapter(StepReply)


def crashed(error: str, seconds: float = 0.0) -> StepReply:
    """Makes the reply of a call that failed; of a long error its beginning."""
    return StepReply(failure="env_crash", error=error[:MAX_ERROR_CHARS], seconds=seconds)


class EnvServer:
    """Holds one agent with its environment, and answers the calls that reach it."""

    agent: Any = None

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs one call; whatever it raises, SystemExit and KeyboardInterrupt included, becomes the reply's error."""
        started = own_clock()
        try:
            return replace(getattr(self, kind)(*args), seconds=own_clock() - started)
        except BaseException as error:
            return crashed(describe(error), own_clock() - started)

    def build(self, spec: Any) -> StepReply:
        """Makes the agent from its spec, pickled or not; replies with its tools."""
        self.agent = (pickle.loads(spec) if isinstance(spec, bytes) else spec).build()
        return StepReply(tools=self.agent.tool_schemas)

    def trial(self, seed: int, episodes: int, max_turn: int, task: Task | None = None) -> StepReply:
        """Plays a few episodes with random and with useless answers; replies with what they paid."""
        return StepReply(trial=play_trial(self.agent, seed, episodes, max_turn, task))

    def reset(self, seed: int, task: Task | None = None) -> StepReply:
        """Starts an episode; replies with its first messages."""
        return StepReply(messages=self.agent.reset(seed, task), anchor=self._anchor())

    def step(self, text: str) -> StepReply:
        """Plays what the policy wrote."""
        messages, reward, done, info = self.agent.step(text)
        told: dict[str, Any] = {"tool_calls": tool_calls(info), "info": numbers(info)}
        anchor = None if done else self._anchor()
        return StepReply(
            messages=messages, reward=float(reward), done=bool(done), anchor=anchor, **told
        )

    def _anchor(self) -> str | None:
        """Returns the environment's own name of the state it is in, where its class has one."""
        anchor = getattr(getattr(self.agent, "environment", None), "anchor", None)
        return str(anchor()) if callable(anchor) else None

    def finish(self, ending: str) -> StepReply:
        """Ends the episode; replies with its own reward, where there is one."""
        reward = self.agent.episode_reward(ending)
        return StepReply(reward=None if reward is None else float(reward), done=True)

    def close(self) -> StepReply:
        """Closes the agent, if there is one."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.close()
        return StepReply(done=True)

    def answer(self, kind: Call, args: tuple[Any, ...]) -> bytes:
        """Runs `call` and writes the reply as JSON; one that cannot be written is an error of the environment."""
        reply = self.call(kind, args)
        try:
            return REPLY.dump_json(reply)
        except BaseException as error:
            text = f"what {kind} returned cannot be sent to another process: {describe(error)}"
            return REPLY.dump_json(crashed(text, reply.seconds))

    def serve(self, connection: Connection) -> None:
        """Answers calls until the agent is closed or nobody is there to ask."""
        kind = ""
        with contextlib.suppress(EOFError, OSError):
            while kind != "close":
                kind, args = pickle.loads(connection.recv_bytes())
                connection.send_bytes(self.answer(kind, args))
        self.call("close", ())


def own_clock(task: str = "thread-self") -> float:
    """Returns the seconds on a clock that stands still while a thread is ready to run and the machine runs others.

    Args:
        task: of Linux's /proc; where there is no such file the clock never stands still.
    """
    try:
        with open(f"/proc/{task}/schedstat") as file:
            return time.monotonic() - int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return time.monotonic()


def tool_calls(info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Takes from a step's info the records of its tool calls, those that are well formed."""
    calls = info.get("tool_calls")
    kinds = {"name": str, "ok": bool, "error_kind": str, "seconds": float | int}
    return [
        {name: call[name] for name in kinds}
        for call in (calls if isinstance(calls, list | tuple) else ())
        if isinstance(call, Mapping)
        and all(isinstance(call.get(name), kind) for name, kind in kinds.items())
    ]


def numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Takes from a step's info its finite numbers, true being 1, under names that are not overly long; MAX_NUMBERS."""
    named = (
        (key, value)
        for key, value in info.items()
        if isinstance(key, str) and len(key) <= MAX_NAME_CHARS
    )
    found = {key: float(value) for key, value in named if isinstance(value, Real)}
    return {
        key: found[key]
        for key in islice((key for key in found if math.isfinite(found[key])), MAX_NUMBERS)
    }


def unpack(answer: bytes) -> StepReply:
    """Reads the reply that `EnvServer.answer` wrote, as data: code of the policy's may have run where it was made."""
    try:
        reply = REPLY.validate_json(answer)
        check_observation(reply.messages, "the reply", max_chars=sys.maxsize)
        check_reward(reply.reward or 0.0, "the reply")
        return replace(reply, tool_calls=tool_calls(vars(reply)), info=numbers(reply.info))
    # Whatever came is no reply.
    except (ValueError, RecursionError) as error:
        return crashed(
            f"the environment's home sent what is no reply: {type(error).__name__}: {error}"
        )


# Env workers


class WorkerLost(RuntimeError):
    """Says that the env worker is gone, with the agent in it."""


class EnvWorker(ABC):
    """Is the place where one agent lives."""

    # Whose `own_clock` counts, the wall's where nobody is called so; and what it showed when the running call began.
    _task, _began = "wall", math.inf

    @abstractmethod
    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs a call of `EnvServer` there and waits for it. Raises WorkerLost."""

    def ran(self) -> float:
        """Returns the seconds, on its `own_clock`, since the running call began, 0 where its reply waits to be read.

        From any thread.
        """
        return max(0.0, own_clock(self._task) - self._began)

    @abstractmethod
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
    """Pickles the spec for another process, also what a script or a notebook defines."""
    try:
        return cloudpickle.dumps(spec)
    # Objects refuse in many ways.
    except Exception as error:
        raise ValueError(say("not_pickled", kind=type(error).__name__, error=error)) from error


class ThreadWorker(EnvWorker):
    """Keeps the agent in the thread that calls; what hangs can be asked to stop, which only reaches Python code."""

    _thread = 0

    def __init__(self) -> None:
        self._server = EnvServer()

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Runs the call here, in the calling thread."""
        self._thread, self._task = threading.get_ident(), f"self/task/{threading.get_native_id()}"
        self._began = own_clock(self._task)
        return self._server.call(kind, args)

    def kill(self) -> None:
        """Raises Abandoned in the thread, which must be alive: the pool's lock and set of slots see to that."""
        thread, exception = ctypes.c_ulong(self._thread), ctypes.py_object(Abandoned)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)


class ForkServer:
    """Is the pool's side of the fork server, which starts with the first env worker, and again should it have died.

    Args:
        environments: those to come, as specs name them; their libraries are imported ahead.
        limits: what each of them may have.
    """

    def __init__(self, environments: Iterable[Any], limits: Limits) -> None:
        self._preload, self._limits = libraries_of(environments), limits
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        # It is sent the process to end, or 0 for a new one; it sends an exit code or a process id.
        self._control: Connection | None = None

    def fork(self) -> tuple[int, Connection]:
        """Forks an env worker; returns its process id and the connection to it. Raises WorkerLost."""
        ours, theirs = Pipe()
        with self._lock, theirs:
            # That it died is only noticed by asking it.
            pid = self._ask(0, theirs) or self._ask(0, theirs)
        if pid is None or pid < 0:
            ours.close()
            raise WorkerLost(
                f"no process for an environment: {os.strerror(-pid) if pid else 'the fork server died'}"
            )
        return pid, ours

    def reap(self, pid: int) -> str:
        """Kills the env worker and its group if they live, and says how it ended."""
        with self._lock:
            code = self._ask(pid)
        if code is None:
            return "with the process that forked it"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def stop(self) -> None:
        """Ends the fork server, and with it every env worker that is left, with whatever those started."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                kill_tree(self._process.pid)
                self._process.wait()
            if self._control is not None:
                self._control.close()

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = Pipe()
        with theirs:
            own = [sys.path, theirs.fileno(), asdict(self._limits), self._preload]
            command = [sys.executable, "-u", "-c", START, json.dumps(own)]
            # Games go by the order of sets: equal seeds are to give equal games in every run.
            env = {"PYTHONHASHSEED": "0"} | os.environ
            self._process = Popen(
                command, pass_fds=[theirs.fileno()], stdin=DEVNULL, start_new_session=True, env=env
            )

    def _ask(self, pid: int, connection: Connection | None = None) -> int | None:
        if connection is not None and (self._process is None or self._process.poll() is not None):
            self._start()
        if self._control is None or self._process is None:
            return None
        with contextlib.suppress(OSError, EOFError):
            self._control.send(pid)
            if connection is not None:
                send_handle(self._control, connection.fileno(), self._process.pid)
            if self._control.poll(ANSWER_S):
                return self._control.recv()
        # An answer that comes late would be taken for the next one's.
        self._process.kill()
        self._process.wait()
        return None


class ProcessWorker(EnvWorker):
    """Keeps the agent in a process that the fork server forked; what the environment starts ends with it."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._connection: Connection | None = None
        self._pid: int | None = None
        self._killed = False
        # Nobody signals a process id that has been given back.
        self._lock = threading.Lock()

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Sends the call to the process, which is forked at the first, and waits for the reply."""
        if self._connection is None:
            self._pid, self._connection = self._fork_server.fork()
            self._task = str(self._pid)
        if self._killed:
            raise WorkerLost("killed before it was ready")
        try:
            # A home that does not read holds up who sends much.
            self._began = own_clock(self._task)
            self._connection.send_bytes(pickle.dumps((kind, args), pickle.HIGHEST_PROTOCOL))
            return unpack(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise WorkerLost(
                f"the environment's process ended during {kind} ({self._release()})"
            ) from None
        finally:
            self._began = math.inf

    def ran(self) -> float:
        """Returns the seconds on the clock of the process's first thread; 0 also before a call is sent."""
        with contextlib.suppress(OSError):
            if self._connection is not None and not self._connection.poll(0):
                return super().ran()
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
    """Keeps the agent in a Ray actor, on whichever node has room; it takes no CPU of Ray's count.

    The actor may be on another machine, so that the wall's clock is its own.
    """

    _actor: Any = None

    def call(self, kind: Call, args: tuple[Any, ...]) -> StepReply:
        """Calls the actor, which is made at the first call, and waits for the reply."""
        import ray

        try:
            if self._actor is None:
                self._actor = ray.remote(num_cpus=0)(EnvServer).remote()
            self._began = own_clock(self._task)
            return unpack(ray.get(self._actor.answer.remote(kind, args)))
        # Ray's own errors have many classes.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise WorkerLost(
                f"the environment's Ray actor ended during {kind}: {why[:500]}"
            ) from None

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
    return (
        ProcessWorker(fork_server)
        if kind == "process"
        else RayWorker()
        if kind == "ray"
        else ThreadWorker()
    )


# The fork server's process


def libraries_of(sources: Iterable[Any]) -> list[str]:
    """Lists the libraries behind environments named LIBRARY:ID."""
    return sorted({library for source in sources if (library := library_of(source))})


def run_fork_server(control_fd: int, limits: dict[str, Any], preload: Sequence[str]) -> None:
    """Forks and reaps, in the fork server, until the pool's process is gone."""
    parent, workers = os.getppid(), set[int]()
    adopt_orphans()
    control = Connection(control_fd)
    for name in ("custom.agent", *preload):
        # A worker that needs it says what is wrong.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # What is loaded stays shared between the workers.
    gc.freeze()
    with contextlib.suppress(OSError, EOFError):
        while os.getppid() == parent:
            if not control.poll(1.0):
                continue
            if pid := control.recv():
                answer = reap_worker(pid)
                workers.discard(pid)
                end_orphans(workers)
            else:
                answer = fork_worker(control, Limits(**limits))
                workers.add(answer)
            control.send(answer)
    end_orphans(set())


def fork_worker(control: Connection, limits: Limits) -> int:
    """Forks, in the fork server, an env worker; returns its process id, or minus the error number."""
    fork_server = os.getpid()
    with Connection(recv_handle(control)) as connection:
        try:
            if pid := os.fork():
                return pid
        except OSError as error:
            return -(error.errno or 1)
        try:
            run_worker(control, connection, fork_server, limits)
        except BaseException:
            traceback.print_exc()
        finally:
            # Not through the frames of the fork server.
            os._exit(0)


def run_worker(
    control: Connection, connection: Connection, fork_server: int, limits: Limits
) -> None:
    """Serves one agent, in the env worker's process."""
    os.setpgid(0, 0)
    die_with_parent()
    if os.getppid() != fork_server:
        return
    control.close()
    adopt_orphans()
    confine(limits)
    # Or all workers would draw alike.
    np.random.seed()
    EnvServer().serve(connection)


def end_orphans(workers: Set[int]) -> None:
    """Ends what env workers left behind, in the fork server: its children that are no worker."""
    for child in psutil.Process().children():
        if child.pid not in workers:
            reap_worker(child.pid)


def reap_worker(pid: int) -> int:
    """Ends an env worker, in the fork server; returns its exit code, negative for a signal."""
    kill_tree(pid)
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).wait(REAP_S)
    return -signal.SIGKILL
