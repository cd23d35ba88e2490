"""The fork server's own process, and the processes of env workers that it forks.

Invariant: what an env worker left behind ends with it, and nothing here outlives the pool's
process: the fork server adopts orphans, ends them, and is killed with its parent's end; env workers
die with the fork server. User code runs in env workers only.
"""

import contextlib
import gc
import importlib
import os
import signal
import traceback
from collections.abc import Sequence, Set
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np
import psutil

from custom.confine import Limits, adopt_orphans, confine, die_with_parent, kill_tree
from workers.environments.server import EnvServer

# The request for a new process; any other is the id of a process to end.
FORK = 0
# How often the fork server looks whether the pool's process is gone.
LOOK_S = 1.0
# The longest that a killed process may take to end.
REAP_S = 1.0


def run_fork_server(control_fd: int, limits: dict[str, Any], preload: Sequence[str]) -> None:
    """Forks and reaps until the pool's process is gone.

    Args:
        control_fd: the socket of requests and answers.
        limits: the fields of each env worker's `Limits`.
        preload: modules that are imported before the first fork.
    """
    parent = os.getppid()
    workers: set[int] = set()
    adopt_orphans()
    control = Connection(control_fd)
    # Every agent needs the first; the second reads a spec that was pickled by value.
    for name in ("custom.agent", "cloudpickle", *preload):
        # A worker that needs it says what is wrong.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Loaded modules stay shared between the workers.
    gc.freeze()
    with contextlib.suppress(OSError, EOFError):
        while os.getppid() == parent:
            if not control.poll(LOOK_S):
                continue
            request = control.recv()
            if request == FORK:
                answer = fork_worker(control, Limits(**limits))
                workers.add(answer)
            else:
                answer = reap_worker(request)
                workers.discard(request)
                end_orphans(workers)
            control.send(answer)
    end_orphans(set())


def fork_worker(control: Connection, limits: Limits) -> int:
    """Forks an env worker; returns its process id, or minus the error number."""
    fork_server = os.getpid()
    with Connection(recv_handle(control)) as connection:
        try:
            pid = os.fork()
        except OSError as error:
            return -(error.errno or 1)
        if pid:
            return pid
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
    # It may have ended before that took effect.
    if os.getppid() != fork_server:
        return
    control.close()
    adopt_orphans()
    confine(limits)
    # Or all workers would draw alike.
    np.random.seed()
    EnvServer().serve(connection)


def end_orphans(workers: Set[int]) -> None:
    """Ends what env workers left behind: the fork server's children that are no worker."""
    for child in psutil.Process().children():
        if child.pid not in workers:
            reap_worker(child.pid)


def reap_worker(pid: int) -> int:
    """Ends an env worker; returns its exit code, negative for a signal."""
    kill_tree(pid)
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).wait(REAP_S)
    return -signal.SIGKILL
