"""A worker group whose ranks Ray has placed, and the calls that reach them.

A pool is a number of ranks, each a process (`WorkerHost`) with the workers of every role placed
there. A group is one role of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from data.play_counts import REPORTS
from data.protocol import DataProto
from data.watchdog import WATCHDOG
from workers.ranks.dispatch import (
    Colocated,
    Dispatch,
    register,
    registered_methods,
    split_batch,
)
from workers.ranks.resource_pool import RayResourcePool
from workers.ranks.worker_host import WorkerHost, worker_environment

# How long the other ranks' errors are waited for after the first.
OTHER_ERRORS_S = 10.0
# How long the ranks' processes may take to end by themselves.
ENDING_S = 10.0


class RayWorkerGroup:
    """Plays one role of a pool whose ranks Ray has placed.

    Args:
        hosts: Ray's handles of the ranks' processes, in the ranks' order.
        placement: the placement group that they are in.
        worker_cls: the class of the role's workers; its registered methods are this object's.
    """

    def __init__(
        self, hosts: list[Any], placement: Any, role: str, worker_cls: Callable[..., Any]
    ) -> None:
        self.hosts = hosts
        self.placement = placement
        self.role = role
        self.worker_cls = worker_cls
        self.world_size = len(hosts)
        self._methods = registered_methods(worker_cls)

    @classmethod
    def start(cls, pool: RayResourcePool, class_dict: Colocated) -> dict[str, RayWorkerGroup]:
        """Places the ranks, has them meet, and builds the workers; one group a role."""
        import ray

        placement = pool.place()
        hosts = _start_hosts(pool, placement)
        address = ray.get(hosts[0].open_store.remote())
        if WATCHDOG.settings.timeout_s < math.inf and WATCHDOG.settings.store is None:
            WATCHDOG.join(address)
        REPORTS.add(address, len(hosts))
        building = [
            host.build.remote(address, dict(class_dict), WATCHDOG.settings) for host in hosts
        ]
        wait_for(building, f"building {', '.join(class_dict)}")
        return {
            role: cls(hosts, placement, role, worker_cls=build_worker.func)
            for role, build_worker in class_dict.items()
        }

    def shutdown(self) -> None:
        """Ends the ranks' processes, which every role of the pool shares, and frees their place."""
        import ray

        # They go with the first rank.
        WATCHDOG.store = None
        REPORTS.clear()
        # Ranks that end by themselves remove their shared memory.
        ending = [host.__ray_terminate__.remote() for host in self.hosts]
        ray.wait(ending, num_returns=len(ending), timeout=ENDING_S)
        for host in self.hosts:
            ray.kill(host)
        ray.util.remove_placement_group(self.placement)

    def require_shared(self, file: Path) -> None:
        """Requires that every rank's node sees a file of the run's folder as the driver does."""
        import ray

        expected = file.read_text()
        texts = ray.get([host.read.remote(str(file)) for host in self.hosts])
        blind = [str(rank) for rank, text in enumerate(texts) if text != expected]
        if blind:
            raise ValueError(
                f"trainer.default_local_dir: ranks {', '.join(blind)}, on other machines than the "
                f"driver, do not see {file.parent} or cannot write there; they write checkpoints "
                "into it: name a folder on a file system that every node mounts under the same path"
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"{self.worker_cls.__name__} has no registered method {name!r}")
        calls: dict[Dispatch, Callable[..., Any]] = {
            Dispatch.RANK_ZERO: self._rank_zero,
            Dispatch.ONE_TO_ALL: self._one_to_all,
            Dispatch.ALL_TO_ALL: self._all_to_all,
            Dispatch.DP_COMPUTE_PROTO: self._dp_compute_proto,
        }
        return partial(calls[self._methods[name].dispatch_mode], name)

    def _rank_zero(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answer = self.hosts[0].call.remote(self.role, name, *args, **kwargs)
        return self._wait(name, [answer])[0]

    def _one_to_all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        answers = [self.hosts[0].call.remote(self.role, name, *args, **kwargs)]
        for host in self.hosts[1:]:
            answers.append(host.run.remote(self.role, name, *args, **kwargs))
        return self._wait(name, answers)[0]

    def _all_to_all(self, name: str, *args: list[Any]) -> list[Any]:
        answers = []
        for host, *rank_args in zip(self.hosts, *args, strict=True):
            answers.append(host.call.remote(self.role, name, *rank_args))
        return self._wait(name, answers)

    def _dp_compute_proto(self, name: str, data: DataProto) -> Any:
        registration = self._methods[name]
        answers = self._call_with_chunks(name, data)
        if not isinstance(answers[0], DataProto):
            return answers[0]
        joined = DataProto.concat(answers)
        if registration.keeps_rows:
            return joined.slice(0, len(data))
        return joined

    def _call_with_chunks(self, name: str, data: DataProto) -> list[Any]:
        """Calls every rank with its chunk of the batch; returns an answer for each chunk.

        What was sent lives in Ray's store for as long as a reference to it does: until this
        function returns.
        """
        import ray

        registration = self._methods[name]
        ranks_per_chunk = 1
        if registration.ranks_per_chunk is not None:
            ranks_per_chunk = getattr(self, registration.ranks_per_chunk)()
        reads = registration.reads
        if registration.further_reads is not None:
            reads += getattr(self, registration.further_reads)()
        count = self.world_size // ranks_per_chunk
        chunks = [ray.put(chunk) for chunk in _chunks(data, registration, reads, count)]
        answers = []
        for rank, host in enumerate(self.hosts):
            chunk = chunks[rank // ranks_per_chunk]
            # Only the first of the ranks that share a chunk answers.
            method = host.call if rank % ranks_per_chunk == 0 else host.run
            answers.append(method.remote(self.role, name, chunk))
        return self._wait(name, answers)[::ranks_per_chunk]

    def _wait(self, name: str, answers: list[Any]) -> list[Any]:
        return wait_for(answers, f"role {self.role}, in {name}")


def _start_hosts(pool: RayResourcePool, placement: Any) -> list[Any]:
    """Starts the process of each rank in its node's bundle; returns their handles."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    make_host_cls = ray.remote(
        num_cpus=1,
        num_gpus=1 if pool.use_gpu else 0,
        runtime_env={"env_vars": worker_environment(threads=pool.cpus)},
    )
    host_cls = make_host_cls(WorkerHost)
    hosts: list[Any] = []
    for node, count in enumerate(pool.process_on_nodes):
        in_bundle = PlacementGroupSchedulingStrategy(placement, node)
        for number_on_node in range(count):
            host = host_cls.options(scheduling_strategy=in_bundle).remote(
                rank=len(hosts),
                world_size=pool.world_size,
                # Ray shows each rank its own GPU only, which is then device 0.
                local_rank=0 if pool.use_gpu else number_on_node,
            )
            hosts.append(host)
    return hosts


def _chunks(
    data: DataProto, registration: register, reads: tuple[str, ...], count: int
) -> Iterator[DataProto]:
    """Yields the chunks of a batch, one after another, as the method wants them."""
    if registration.keeps_rows:
        yield from split_batch(data, reads, count)
        return
    # No row is added: chunks differ by one row at most.
    for rows in np.array_split(np.arange(len(data)), count):
        yield data.select_idxs(rows)


def wait_for(answers: list[Any], doing: str) -> list[Any]:
    """Waits for the answers to one call of every rank; returns them in the ranks' order.

    Args:
        doing: what the ranks do, for the note that an error gets.

    Raises:
        ray.exceptions.RayError: of the first rank that failed, with a note of rank and call. A rank
            that died comes before others, which fail for want of it.
    """
    import ray

    try:
        return ray.get(answers)
    except ray.exceptions.RayError:
        errors = _errors_by_rank(answers)
        if not errors:
            raise
        rank = _cause(errors)
        errors[rank].add_note(f"rank {rank} of {len(answers)}, {doing}, {WATCHDOG.where}")
        raise errors[rank] from None


def _errors_by_rank(answers: list[Any]) -> dict[int, Exception]:
    """Collects the errors of a call that has failed on one rank.

    `ray.get` raises the first error it meets; the other ranks' come soon after, or, if they wait
    for the one that failed, not at all.
    """
    import ray

    done, _ = ray.wait(
        answers,
        num_returns=len(answers),
        timeout=OTHER_ERRORS_S,
        fetch_local=False,
    )
    errors: dict[int, Exception] = {}
    for answer in done:
        try:
            ray.get(answer)
        except ray.exceptions.RayError as error:
            errors[answers.index(answer)] = error
    return errors


def _cause(errors: dict[int, Exception]) -> int:
    """Returns the rank whose error comes first: the first that died, else the first that failed."""
    import ray

    died = [
        rank for rank, error in errors.items() if isinstance(error, ray.exceptions.RayActorError)
    ]
    return min(died or errors)
