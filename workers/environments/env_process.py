"""What a process of an env worker does, which a fork server has forked (fork_server_process.py).

Invariant: user code runs in env workers only, never in the fork server.
"""

from multiprocessing.connection import Connection
from typing import Any

from custom.confine import Limits, adopt_orphans, confine
from workers.environments.server import EnvServer


def run(request: dict[str, Any], files: list[int]) -> int:
    """Serves one agent over the connection that came with the request; returns the exit code.

    Args:
        request: `limits`, the fields of the process's `Limits`.
    """
    # What the environment leaves behind is found, and ends, with this process.
    adopt_orphans()
    confine(Limits(**request["limits"]))
    [file] = files
    with Connection(file) as connection:
        EnvServer().serve(connection)
    return 0
