"""One rank's process under Ray: it meets the other ranks, and holds the workers placed there.

Actor, rollout, reference and critic so share a process, its GPU and its process group.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from data.play_counts import report_to
from data.watchdog import WATCHDOG, WatchdogSettings
from workers.ranks.dispatch import Colocated
from workers.ranks.memory import keep_heap
from workers.ranks.process_groups import open_store

LOOPBACK = "127.0.0.1"
PROJECT = Path(__file__).resolve().parents[2]
# Variables of the driver's environment that the ranks' processes get.
INHERITED = (
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "TOKENIZERS_PARALLELISM",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
)


class WorkerHost:
    """Runs in one rank's process, and calls the workers of every role placed there."""

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_rank = local_rank

    def open_store(self) -> tuple[str, int]:
        """Opens the store at which the ranks meet; returns host and port."""
        import ray

        host = ray.util.get_node_ip_address()
        # The store is there for as long as this object holds it.
        self.store, port = open_store(host)
        return host, port

    def build(
        self, address: tuple[str, int], class_dict: Colocated, watched: WatchdogSettings
    ) -> None:
        """Joins the ranks that meet at `address`, starts the watch, and builds the workers."""
        if watched.timeout_s < math.inf:
            WATCHDOG.start(watched, f"rank_{self.rank}", driver=False)
        report_to(address, self.rank)
        self._set_rank_variables(*address)
        keep_heap()
        self.workers = {role: build_worker() for role, build_worker in class_dict.items()}

    def _set_rank_variables(self, host: str, port: int) -> None:
        """Sets what torch.distributed reads of a rank's environment."""
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["LOCAL_RANK"] = str(self.local_rank)
        os.environ["MASTER_ADDR"] = host
        os.environ["MASTER_PORT"] = str(port)
        # By these two torch knows that the store is there already.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
        if host == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def read(self, path: str) -> str | None:
        """Returns the text of a file that this node can write, too; None where it cannot."""
        if not os.access(path, os.W_OK):
            return None
        return Path(path).read_text()

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a worker's method and returns its answer."""
        WATCHDOG.place = f"{method} of role {role}"
        WATCHDOG.beat(f"{method} began")
        return getattr(self.workers[role], method)(*args, **kwargs)

    def run(self, role: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Runs `call` where nobody reads this rank's answer, which is then not sent."""
        self.call(role, method, *args, **kwargs)


def worker_environment(threads: int) -> dict[str, str]:
    """Returns the variables of a rank's process: this project's packages, caches, and threads.

    Ray gives an actor of one CPU a single thread.
    """
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ}
    python_path = [str(PROJECT)]
    if os.environ.get("PYTHONPATH"):
        python_path.append(os.environ["PYTHONPATH"])
    environment["PYTHONPATH"] = os.pathsep.join(python_path)
    environment["OMP_NUM_THREADS"] = str(threads)
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment
