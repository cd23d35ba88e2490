"""A worker group of one rank in the driver's own process.

A call is a plain call, so that breakpoints and tracebacks work. Invariant: the worker gets the same
fields of a batch as a rank of Ray's would, so that a field which is read but not registered is
missed here too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from data.play_counts import REPORTS
from data.protocol import DataProto
from workers.ranks.dispatch import Colocated, Dispatch, registered_methods, split_batch
from workers.ranks.resource_pool import RayResourcePool


class LocalWorkerGroup:
    """Plays one role of a pool of one rank; its worker's registered methods are this object's."""

    world_size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._methods = registered_methods(type(worker))

    @classmethod
    def start(cls, pool: RayResourcePool, class_dict: Colocated) -> dict[str, LocalWorkerGroup]:
        """Builds the workers; one group a role."""
        assert pool.world_size == 1, "trainer.launcher=local has one rank"
        # Ranks of a run before, which was not shut down, may still report.
        REPORTS.clear()
        return {role: cls(build_worker()) for role, build_worker in class_dict.items()}

    def shutdown(self) -> None:
        """Does nothing: the worker goes with the driver."""

    def require_shared(self, file: Path) -> None:
        """Does nothing: the worker sees what the driver sees."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"{type(self.worker).__name__} has no registered method {name!r}")
        method = getattr(self.worker, name)
        registration = self._methods[name]
        if registration.dispatch_mode is Dispatch.ALL_TO_ALL:
            return partial(_all_to_all, method)
        if registration.dispatch_mode is Dispatch.DP_COMPUTE_PROTO:
            reads = registration.reads
            if registration.further_reads is not None:
                reads += getattr(self.worker, registration.further_reads)()
            return partial(_dp_compute_proto, method, reads)
        return method


def _all_to_all(method: Callable[..., Any], *args: list[Any]) -> list[Any]:
    """Calls the method with the one entry of each argument list."""
    return [method(*(argument[0] for argument in args))]


def _dp_compute_proto(
    method: Callable[[DataProto], Any], reads: tuple[str, ...], data: DataProto
) -> Any:
    """Calls the method with the fields of the batch that it reads."""
    return method(split_batch(data, reads, 1)[0])
