"""The pool's side of the fork server, which forks a process for an environment in milliseconds.

The fork server (fork_server_process.py) is a small process that has imported what every agent
needs:

    pool's process                       fork server                   an env worker's process
    ProcessWorker.call  <---- socket pair: pickled calls, JSON replies ---->  EnvServer.serve
    ForkServer.fork     ---- one end of it ---->  fork  --------------->

Env workers die with it, and it ends them and itself when the pool's process is gone, even by
SIGKILL. It is ours and not multiprocessing's "forkserver", which imports the main script, with its
torch, in every child. It never runs user code.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from subprocess import DEVNULL, Popen

from custom.confine import Limits, kill_tree
from workers.environments.fork_server_process import FORK
from workers.environments.reply import WorkerLost

# The longest that the fork server may take to answer; its start is slow on a busy machine.
ANSWER_S = 60.0
# The program of the fork server's process.
START = """
import json, sys
arguments = json.loads(sys.argv[1])
sys.path[:] = arguments.pop("path")
from workers.environments.fork_server_process import run_fork_server
run_fork_server(**arguments)
"""


class ForkServer:
    """Asks the fork server for processes; starts it with the first, and again should it have died.

    Args:
        libraries: those of each spec, which are imported ahead.
        limits: what each of them may have.
    """

    def __init__(self, libraries: Iterable[Sequence[str]], limits: Limits) -> None:
        self._preload = sorted({name for of_spec in libraries for name in of_spec})
        self._limits = limits
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None
        # Requests go out, which are FORK or the id of a process to end; answers come back, which
        # are a process id, minus an error number, or an exit code.
        self._control: Connection | None = None

    def fork(self) -> tuple[int, Connection]:
        """Forks an env worker; returns its process id and a connection to it. Raises WorkerLost."""
        ours, theirs = Pipe()
        with self._lock, theirs:
            pid = self._ask_for_process(theirs)
            if pid is None:
                # That it died is only noticed by asking it.
                pid = self._ask_for_process(theirs)
        if pid is not None and pid > 0:
            return pid, ours
        ours.close()
        why = "the fork server died" if pid is None else os.strerror(-pid)
        raise WorkerLost(f"no process for an environment: {why}")

    def reap(self, pid: int) -> str:
        """Kills the env worker and its group if they live; returns how it ended."""
        with self._lock:
            code = self._ask(pid)
        if code is None:
            return "with the process that forked it"
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def stop(self) -> None:
        """Ends the fork server and every env worker that is left, with whatever those started."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                kill_tree(self._process.pid)
                self._process.wait()
            if self._control is not None:
                self._control.close()

    def _start(self) -> None:
        """Starts the fork server's process, in a session of its own."""
        if self._control is not None:
            self._control.close()
        self._control, theirs = Pipe()
        with theirs:
            arguments = {
                "path": sys.path,
                "control_fd": theirs.fileno(),
                "limits": asdict(self._limits),
                "preload": self._preload,
            }
            # Games go by the order of sets: equal seeds are to give equal games in every run.
            environment = {"PYTHONHASHSEED": "0"} | os.environ
            self._process = Popen(
                [sys.executable, "-u", "-c", START, json.dumps(arguments)],
                pass_fds=[theirs.fileno()],
                stdin=DEVNULL,
                start_new_session=True,
                env=environment,
            )

    def _ask_for_process(self, connection: Connection) -> int | None:
        """Asks for a process that is served over `connection`; returns its id, as `_ask` does."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._ask(FORK, connection)

    def _ask(self, request: int, connection: Connection | None = None) -> int | None:
        """Sends a request, and the connection that belongs to it; returns the answer.

        None where the fork server is gone, or gives no answer in time: it is killed then.
        """
        if self._control is None or self._process is None:
            return None
        with contextlib.suppress(OSError, EOFError):
            self._control.send(request)
            if connection is not None:
                send_handle(self._control, connection.fileno(), self._process.pid)
            if self._control.poll(ANSWER_S):
                return self._control.recv()
        # An answer that comes late would be taken for the next one's.
        self._process.kill()
        self._process.wait()
        return None
