"""The fork server: a small process that has imported what every agent needs, and forks env workers in milliseconds.

    pool's process                       fork server                   an env worker
    ProcessWorker.call  <---- socket pair: pickled calls and replies ---->  EnvServer.serve
    ForkServer.fork     ---- one end of it ---->  fork  --------------->

Workers die with it, and it ends its workers and itself when the pool's process is gone, even by SIGKILL. It is ours and
not multiprocessing's "forkserver", which imports the main script, with its torch, in every child. It never runs user
code.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any

import numpy as np
import psutil

from custom.adapters import library_of
from custom.confine import Limits, adopt_orphans, confine, die_with_parent, kill_tree
from workers.environments.env_server import EnvServer

# The longest that a killed process may take to end.
REAP_S = 1.0
# The longest that the fork server may take to answer; its start is slow on a busy machine.
ANSWER_S = 60.0
START = "import json, sys; sys.path[:], *own = json.loads(sys.argv[1]); "
START += "from workers.environments.fork_server import run_fork_server; run_fork_server(*own)"


class WorkerLost(RuntimeError):
    """Says that the env worker is gone, with the agent in it."""


class ForkServer:
    """Is the pool's side of the fork server, which starts with the first env worker, and again should it have died."""

    def __init__(self, preload: Sequence[str] = (), limits: Limits | None = None) -> None:
        self._preload, self._limits = preload, limits or Limits()
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        # It is sent the process to end, 0 for a new one, None to end itself; it sends an exit code or a process id.
        self._control: Connection | None = None

    def fork(self) -> tuple[int, Connection]:
        """Forks an env worker; returns its process id and the connection to it. Raises WorkerLost."""
        ours, theirs = Pipe()
        with self._lock, theirs:
            # That it died is only noticed by asking it.
            for _ in range(2):
                if self._process is None or self._process.poll() is not None:
                    self._start()
                if pid := self._ask(0, theirs):
                    break
        if pid is None or pid < 0:
            ours.close()
            raise WorkerLost(f"no process for an environment: {os.strerror(-pid) if pid else 'the fork server died'}")
        return pid, ours

    def reap(self, pid: int) -> str:
        """Kills the env worker and its group if they live, and says how it ended."""
        with self._lock:
            code = self._ask(pid)
        if code is None:
            return "with the process that forked it"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def stop(self) -> None:
        """Ends the fork server, and with it every env worker that is left."""
        with self._lock:
            process, control, self._process, self._control = self._process, self._control, None, None
        if process is not None and control is not None:
            with contextlib.suppress(OSError), control:
                # Closing alone is not seen where a forked process holds a copy.
                control.send(None)
            try:
                process.wait(ANSWER_S)
            except TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self) -> None:
        if self._control is not None:
            self._control.close()
        self._control, theirs = Pipe()
        with theirs:
            own = [sys.path, theirs.fileno(), asdict(self._limits), self._preload]
            command = [sys.executable, "-c", START, json.dumps(own)]
            # Games go by the order of sets: equal seeds are to give equal games in every run.
            env = {"PYTHONHASHSEED": "0"} | os.environ
            self._process = Popen(command, pass_fds=[theirs.fileno()], stdin=DEVNULL, start_new_session=True, env=env)

    def _ask(self, pid: int, connection: Connection | None = None) -> int | None:
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


def libraries_of(sources: Iterable[Any]) -> list[str]:
    """Lists the libraries behind environments named LIBRARY:ID."""
    return sorted({library for source in sources if (library := library_of(source))})


def run_fork_server(control_fd: int, limits: dict[str, Any], preload: Sequence[str]) -> None:
    """Forks and reaps, in the fork server, until the pool's process is gone."""
    parent, workers = os.getppid(), set[int]()
    adopt_orphans()
    control = Connection(control_fd)
    for name in ("custom.agent", "cloudpickle", *preload):
        # A worker that needs it says what is wrong.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # What is loaded stays shared between the workers.
    gc.freeze()
    with contextlib.suppress(OSError, EOFError):
        while os.getppid() == parent:
            if not control.poll(1.0):
                continue
            if (pid := control.recv()) is None:
                break
            if pid:
                answer = reap_worker(pid)
                workers.discard(pid)
                end_orphans(workers)
            else:
                answer = fork_worker(control, recv_handle(control), Limits(**limits))
                workers.add(answer)
            control.send(answer)
    end_orphans(set())


def fork_worker(control: Connection, connection_fd: int, limits: Limits) -> int:
    """Forks, in the fork server, an env worker; returns its process id, or minus the error number."""
    fork_server = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(connection_fd)
        return -(error.errno or 1)
    if pid == 0:
        try:
            run_worker(control, connection_fd, fork_server, limits)
        except BaseException:
            traceback.print_exc()
        finally:
            # Not through the frames of the fork server.
            os._exit(0)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        # Here and in the worker: whoever comes first.
        os.setpgid(pid, pid)
    os.close(connection_fd)
    return pid


def run_worker(control: Connection, connection_fd: int, fork_server: int, limits: Limits) -> None:
    """Serves one agent, in the env worker's process."""
    os.setpgid(0, 0)
    die_with_parent()
    if os.getppid() != fork_server:
        return
    control.close()
    adopt_orphans()
    confine(limits)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Or all workers would draw alike.
    np.random.seed()
    EnvServer().serve(Connection(connection_fd))
    sys.stdout.flush()


def end_orphans(workers: Set[int]) -> None:
    """Ends what env workers left behind, in the fork server: its children that are no worker."""
    for child in psutil.Process().children():
        if child.pid not in workers:
            reap_worker(child.pid)


def reap_worker(pid: int) -> int:
    """Ends an env worker, in the fork server; returns its exit code, negative for a signal."""
    kill_tree(pid)
    with contextlib.suppress(psutil.Error):
        child = psutil.Process(pid)
        # What an env worker left behind leads no group.
        child.kill()
        return child.wait(REAP_S)
    return -signal.SIGKILL
