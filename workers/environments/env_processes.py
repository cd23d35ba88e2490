"""The pool's side of env workers' processes, which a fork server forks in milliseconds.

pool's process                                             an env worker's process
ProcessWorker.call  <---- pickled calls, JSON replies ---->  EnvServer.serve
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from custom.confine import Limits
from workers.environments.fork_server import CannotFork, Child, ForkServer, ForkServerLost
from workers.environments.reply import WorkerLost

CHILD_FILE = Path(__file__).with_name("env_process.py")
# The longest that the fork server may take to answer; its start is slow on a busy machine.
ANSWER_S = 60.0
# The longest wait for the end of a process that was killed, in seconds.
REAP_S = 5.0
# Every agent needs the first; the second reads a spec that was pickled by value.
ALWAYS_LOADED = ("custom.agent", "cloudpickle")


@dataclass(frozen=True)
class EnvProcess:
    """Holds an env worker's process, and the connection to it."""

    child: Child
    connection: Connection

    @property
    def pid(self) -> int:
        """Returns its process id."""
        return self.child.started.result()

    def kill(self) -> None:
        """Kills the process with whatever it started; may be called from any thread."""
        self.child.kill()

    def reap(self) -> str:
        """Kills the process and its group if they live; returns how it ended."""
        self.child.kill()
        code = -signal.SIGKILL
        try:
            # The system may take its time to end what was killed.
            with contextlib.suppress(TimeoutError):
                code = self.child.ended.result(REAP_S)
        except ForkServerLost:
            return "with the process that forked it"
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"


class EnvProcesses:
    """Has env workers forked; starts the fork server with the first, and again should it have died.

    Args:
        libraries: those of each spec, which are imported ahead.
        limits: what each process may have.
    """

    def __init__(self, libraries: Iterable[Sequence[str]], limits: Limits) -> None:
        self._modules = sorted({name for of_spec in libraries for name in of_spec})
        self._request = {"limits": asdict(limits)}
        self._lock = threading.Lock()
        self._server: ForkServer | None = None

    def fork(self) -> EnvProcess:
        """Forks an env worker. Raises WorkerLost."""
        ours, theirs = Pipe()
        try:
            with self._lock, theirs:
                child = self._fork(theirs)
        except CannotFork as error:
            ours.close()
            raise WorkerLost(f"no process for an environment: {error}") from None
        return EnvProcess(child, ours)

    def stop(self) -> None:
        """Ends the fork server and every env worker that is left, with whatever those started."""
        with self._lock:
            if self._server is not None:
                self._server.stop()

    def _fork(self, connection: Connection) -> Child:
        """Asks for a process that is served over a connection, and once more."""
        with contextlib.suppress(ForkServerLost):
            return self._ask(connection)
        # That it died is only noticed by asking it.
        return self._ask(connection)

    def _ask(self, connection: Connection) -> Child:
        """Asks for a process that is served over a connection. Raises CannotFork."""
        if self._server is not None and self._server.is_lost:
            self._server.stop()
            self._server = None
        if self._server is None:
            self._server = ForkServer(
                CHILD_FILE,
                # A worker that needs one that cannot be imported says what is wrong.
                modules=[*ALWAYS_LOADED, *self._modules],
                python=(sys.executable, "-u"),
                path=sys.path,
            )
        child = self._server.start(self._request, [connection.fileno()])
        try:
            child.started.result(ANSWER_S)
        except TimeoutError:
            self._server.stop()
            raise ForkServerLost(f"the fork server gives no answer in {ANSWER_S:g} s") from None
        return child
