"""The place of a run's ranks: how many on how many nodes, and Ray's reservation for them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from data.watchdog import ATTEMPT

# How long a run waits for the cluster to have room.
PLACING_S = 120.0
# After a restart it also waits for a node that has left to come back.
PLACING_AFTER_RESTART_S = 600.0


@dataclass(frozen=True)
class RayResourcePool:
    """Describes ranks on nodes: `process_on_nodes` = [8, 8] is two nodes of eight.

    Each rank gets a GPU, or `cpus` threads without.
    """

    process_on_nodes: tuple[int, ...]
    use_gpu: bool
    cpus: int = 1

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return sum(self.process_on_nodes)

    def place(self, timeout_s: float | None = None) -> Any:
        """Reserves a placement group with one bundle a node for all the node's ranks.

        Several nodes are kept apart.

        Args:
            timeout_s: how long to wait for room; None: PLACING_S, longer after a restart.

        Raises:
            RuntimeError: the cluster cannot hold them; names what was asked for and what there is.
        """
        import ray
        from ray.util.placement_group import placement_group

        if timeout_s is None:
            timeout_s = _placing_timeout_s()
        one_rank = {"CPU": 1.0}
        if self.use_gpu:
            one_rank["GPU"] = 1.0
        bundles = []
        for count in self.process_on_nodes:
            bundles.append({resource: amount * count for resource, amount in one_rank.items()})
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
        placement = placement_group(bundles, strategy=strategy)
        if not placement.wait(timeout_s):
            raise RuntimeError(
                f"no room for {self.process_on_nodes} ranks of {one_rank} "
                f"(trainer.nnodes x trainer.n_gpus_per_node) after {timeout_s:.0f} s; "
                f"the cluster has {ray.cluster_resources()}"
            )
        return placement


def _placing_timeout_s() -> float:
    """Returns how long this attempt at the run waits for the cluster to have room."""
    is_first_attempt = os.environ.get(ATTEMPT, "1") == "1"
    return PLACING_S if is_first_attempt else PLACING_AFTER_RESTART_S
