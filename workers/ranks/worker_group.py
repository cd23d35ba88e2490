"""Where workers live and how a call reaches them: `register` marks a worker's methods, a group offers them.

A pool is a number of ranks. Each rank is one process (`WorkerHost`) that holds the workers of every role placed there,
so that actor, rollout, reference and critic share it. A group is one role of a pool. `LocalWorkerGroup` is a pool of
one rank in the driver's own process: a call is a plain call, so breakpoints and tracebacks work. `RayWorkerGroup`
places the ranks with Ray. Invariant: both offer the same methods, hand over the same fields of a batch, and give the
same results.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from data.protocol import DataProto, pad_dataproto_to_divisor
from data.texts import say
from data.watch import ATTEMPT, WATCH, Watched
from workers.ranks.distributed import open_store, settle_heap

Method = TypeVar("Method", bound=Callable[..., Any])
REGISTERED = "_registered"
LOOPBACK = "127.0.0.1"
# How long the other ranks' errors are waited for after the first.
SETTLING_S = 10.0
# How long is waited for the cluster to have room; after a restart, also for a node that has left to come back.
PLACING_S = 120.0 if os.environ.get(ATTEMPT, "1") == "1" else 600.0
PROJECT = Path(__file__).resolve().parents[2]
# Variables of the driver's environment that the ranks' processes get.
INHERITED: tuple[str, ...] = ("HF_HUB_OFFLINE", "HF_HOME", "TOKENIZERS_PARALLELISM")
INHERITED += ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


class Dispatch(Enum):
    """Says how a call reaches the ranks of a group, and what comes back.

    RANK_ZERO: the first rank alone. ONE_TO_ALL: every rank with the same arguments; the first rank's answer.
    ALL_TO_ALL: argument lists with one entry a rank; the list of answers. DP_COMPUTE_PROTO: the DataProto is cut into
    equal chunks, padded with dummy rows where it does not divide; answers that are DataProtos are joined, of others
    (metrics, which the ranks have summed up) the first rank's is given.
    """

    RANK_ZERO = "rank_zero"
    ONE_TO_ALL = "one_to_all"
    ALL_TO_ALL = "all_to_all"
    DP_COMPUTE_PROTO = "dp_compute_proto"


@dataclass(frozen=True)
class register:
    """Marks a worker's method as callable through its group, and says how it wants to be called.

    Args:
        reads: of the batch's fields, only these and `uid` are sent (those of them that it has); none named: all.
        ranks_per_chunk: a registered method of the worker that says how many consecutive ranks share one chunk (tensor
            or sequence parallelism).
        keeps_rows: an answer has a row for each given; otherwise any number, and no row is added to those given.
    """

    dispatch_mode: Dispatch = Dispatch.ALL_TO_ALL
    _: KW_ONLY
    reads: tuple[str, ...] = ()
    ranks_per_chunk: str | None = None
    keeps_rows: bool = True

    def __call__(self, method: Method) -> Method:
        setattr(method, REGISTERED, self)
        return method


def registered_methods(worker_cls: object) -> dict[str, register]:
    """Finds the methods that `register` marked, inherited ones included."""
    found = ((name, getattr(worker_cls, name)) for name in dir(worker_cls))
    return {
        name: getattr(method, REGISTERED) for name, method in found if hasattr(method, REGISTERED)
    }


# A class with its constructor's arguments, to be built where it will run.
ClassWithInitArgs: TypeAlias = partial[Any]
RayClassWithInitArgs = ClassWithInitArgs
Colocated = Mapping[str, ClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Colocated) -> Colocated:
    """Takes the workers of several roles, by role, that are to share each process of a pool."""
    return dict(class_dict)


class LocalWorkerGroup:
    """Is one role of a pool of one rank, in this process; its worker's registered methods are this object's."""

    world_size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self._methods = registered_methods(type(worker))

    @classmethod
    def start(cls, pool: RayResourcePool, class_dict: Colocated) -> dict[str, LocalWorkerGroup]:
        """Builds the workers; one group a role."""
        assert pool.world_size == 1, "trainer.launcher=local has one rank"
        return {role: cls(spec()) for role, spec in class_dict.items()}

    def shutdown(self) -> None:
        """Does nothing: the worker goes with the driver."""

    def require_shared(self, file: Path) -> None:
        """Does nothing: the worker sees what the driver sees."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"{type(self.worker).__name__} has no registered method {name!r}")
        method, how = getattr(self.worker, name), self._methods[name]
        if how.dispatch_mode is Dispatch.ALL_TO_ALL:
            return lambda *args: [method(*(argument[0] for argument in args))]
        if how.dispatch_mode is Dispatch.DP_COMPUTE_PROTO:
            return lambda data: method(cut(data, how.reads, 1)[0])
        return method


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

    def place(self, timeout_s: float = PLACING_S) -> Any:
        """Reserves a placement group with one bundle a node for all the node's ranks; several nodes are kept apart.

        Raises:
            RuntimeError: the cluster cannot hold them; says what was asked for and what there is.
        """
        import ray
        from ray.util.placement_group import placement_group

        one_rank = {"CPU": 1.0, "GPU": 1.0} if self.use_gpu else {"CPU": 1.0}
        nodes = [
            {key: value * count for key, value in one_rank.items()}
            for count in self.process_on_nodes
        ]
        group = placement_group(
            nodes, strategy="STRICT_SPREAD" if len(nodes) > 1 else "STRICT_PACK"
        )
        if not group.wait(timeout_s):
            raise RuntimeError(
                say(
                    "no_room",
                    pool=self,
                    each=one_rank,
                    seconds=timeout_s,
                    has=ray.cluster_resources(),
                )
            )
        return group


class WorkerHost:
    """Is one rank's process, with the workers of every role placed there."""

    def __init__(self, rank: int, world_size: int, local_rank: int) -> None:
        self.environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(local_rank),
        }

    def open_store(self) -> tuple[str, int]:
        """Opens the store at which the ranks meet; returns host and port."""
        import ray

        host = ray.util.get_node_ip_address()
        self.store, port = open_store(host)
        return host, port

    def build(self, address: tuple[str, int], class_dict: Colocated, watched: Watched) -> None:
        """Joins the ranks that meet at `address`, is watched, and builds the workers of every role."""
        if watched.timeout_s < math.inf:
            WATCH.start(watched, f"rank_{self.environment['RANK']}", driver=False)
        os.environ |= {
            **self.environment,
            "MASTER_ADDR": address[0],
            "MASTER_PORT": str(address[1]),
        }
        # By these two torch knows that the store is there already.
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        if address[0] == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        settle_heap()
        self.workers = {role: spec() for role, spec in class_dict.items()}

    def read(self, path: str) -> str | None:
        """Returns the text of a file that this node can write, too; None where it cannot."""
        return Path(path).read_text() if os.access(path, os.W_OK) else None

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a worker's method and returns its answer."""
        WATCH.place = f"{method} of role {role}"
        WATCH.beat(f"{method} began")
        return getattr(self.workers[role], method)(*args, **kwargs)

    def run(self, role: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Runs `call` where nobody reads this rank's answer, which is then not sent."""
        self.call(role, method, *args, **kwargs)


class RayWorkerGroup:
    """Is one role of a pool whose ranks Ray has placed."""

    def __init__(
        self, hosts: list[Any], placement: Any, role: str, worker_cls: Callable[..., Any]
    ) -> None:
        self.hosts, self.placement, self.role, self.worker_cls = hosts, placement, role, worker_cls
        self.world_size = len(hosts)
        self._methods = registered_methods(worker_cls)

    @classmethod
    def start(cls, pool: RayResourcePool, class_dict: Colocated) -> dict[str, RayWorkerGroup]:
        """Places the ranks, has them meet, and builds the workers; one group a role."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement, environment = pool.place(), {"env_vars": worker_environment(pool)}
        host_cls = ray.remote(num_cpus=1, num_gpus=int(pool.use_gpu), runtime_env=environment)(
            WorkerHost
        )
        places = [
            (node, local)
            for node, count in enumerate(pool.process_on_nodes)
            for local in range(count)
        ]
        hosts = []
        for rank, (node, local_rank) in enumerate(places):
            host = host_cls.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, node)
            )
            # Ray shows each rank its own GPU only, which is then device 0.
            hosts.append(host.remote(rank, pool.world_size, 0 if pool.use_gpu else local_rank))
        address = ray.get(hosts[0].open_store.remote())
        if WATCH.settings.timeout_s < math.inf and WATCH.settings.store is None:
            WATCH.join(address)
        own = address, dict(class_dict), WATCH.settings
        wait_for([host.build.remote(*own) for host in hosts], f"building {', '.join(class_dict)}")
        return {role: cls(hosts, placement, role, spec.func) for role, spec in class_dict.items()}

    def shutdown(self) -> None:
        """Ends the ranks' processes, which every role of the pool shares, and frees their place."""
        import ray

        # It goes with the first rank.
        WATCH.store = None
        # Given ten seconds to end by themselves, they remove their shared memory.
        ray.wait(
            [host.__ray_terminate__.remote() for host in self.hosts],
            num_returns=len(self.hosts),
            timeout=10,
        )
        for host in self.hosts:
            ray.kill(host)
        ray.util.remove_placement_group(self.placement)

    def require_shared(self, file: Path) -> None:
        """Requires that every rank's node sees a file of the run's folder as the driver does."""
        import ray

        texts = ray.get([host.read.remote(str(file)) for host in self.hosts])
        if blind := [str(rank) for rank, text in enumerate(texts) if text != file.read_text()]:
            raise ValueError(say("not_shared", folder=file.parent, ranks=", ".join(blind)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._methods:
            raise AttributeError(f"{self.worker_cls.__name__} has no registered method {name!r}")
        return partial(getattr(self, f"_{self._methods[name].dispatch_mode.value}"), name)

    def _rank_zero(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._wait(name, [self.hosts[0].call.remote(self.role, name, *args, **kwargs)])[0]

    def _one_to_all(self, name: str, *args: Any, **kwargs: Any) -> Any:
        methods = [self.hosts[0].call, *(host.run for host in self.hosts[1:])]
        return self._wait(
            name, [method.remote(self.role, name, *args, **kwargs) for method in methods]
        )[0]

    def _all_to_all(self, name: str, *args: Any) -> list[Any]:
        calls = zip(self.hosts, *args, strict=True)
        return self._wait(name, [host.call.remote(self.role, name, *own) for host, *own in calls])

    def _dp_compute_proto(self, name: str, data: DataProto) -> Any:
        import ray

        how = self._methods[name]
        ranks_per_chunk = getattr(self, how.ranks_per_chunk)() if how.ranks_per_chunk else 1
        pieces = self.world_size // ranks_per_chunk
        # Where rows are not kept, chunks differ by one row at most.
        uneven = np.array_split(np.arange(len(data)), pieces)
        cuts = cut(data, how.reads, pieces) if how.keeps_rows else map(data.select_idxs, uneven)
        chunks = [ray.put(chunk) for chunk in cuts]
        methods = [
            host.run if rank % ranks_per_chunk else host.call
            for rank, host in enumerate(self.hosts)
        ]
        calls = [
            method.remote(self.role, name, chunks[rank // ranks_per_chunk])
            for rank, method in enumerate(methods)
        ]
        answers = self._wait(name, calls)[::ranks_per_chunk]
        # Ray keeps what was sent, and the answers as they came, for as long as they can be asked for.
        del calls, chunks
        if not isinstance(answers[0], DataProto):
            return answers[0]
        joined = DataProto.concat(answers)
        return joined.slice(0, len(data)) if how.keeps_rows else joined

    def _wait(self, name: str, calls: list[Any]) -> list[Any]:
        return wait_for(calls, f"role {self.role}, in {name}")


def wait_for(calls: list[Any], doing: str) -> list[Any]:
    """Waits for the answers to one call of every rank; returns them in the ranks' order.

    Raises:
        ray.exceptions.RayError: the first rank's that failed, with a note of rank and call. A rank that died comes
            before others, which fail for want of it.
    """
    import ray

    try:
        return ray.get(calls)
    except ray.exceptions.RayError:
        # `get` raises the first error it meets; the other ranks' come soon after, or, if they wait for the one that
        # failed, not at all.
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=SETTLING_S, fetch_local=False)
        errors: dict[int, Exception] = {}
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                errors[calls.index(call)] = error
        if not errors:
            raise
        rank = min(
            errors,
            key=lambda rank: (not isinstance(errors[rank], ray.exceptions.RayActorError), rank),
        )
        errors[rank].add_note(f"rank {rank} of {len(calls)}, {doing}, {WATCH.where}")
        raise errors[rank] from None


def cut(data: DataProto, reads: Iterable[str], chunks: int) -> list[DataProto]:
    """Cuts a batch into equal chunks, with the fields that are read (none named: all) and `uid`.

    `uid` says what rows belong together. Chunks are views: nothing is copied but where the rows do not divide. Then
    rows are added behind the last, with nothing sampled.
    """
    fields = ("uid", *reads)
    if wanted := [name for name in fields if name in data.batch]:
        data = data.select(wanted, [name for name in fields if name in data.non_tensor_batch])
    if len(data) % chunks == 0:
        return data.chunk(chunks)
    size = -(-len(data) // chunks)
    # Chunks of given rows alone; what is left has a row, of which the added are made.
    whole = (len(data) - 1) // size
    rest, missing = data.slice(whole * size), (chunks - whole) * size
    masked = "response_mask" in data.batch
    padded = (
        rest.pad_with_dummies(missing) if masked else pad_dataproto_to_divisor(rest, missing)[0]
    )
    return data.slice(0, whole * size).split(size) + padded.chunk(chunks - whole)


def worker_environment(pool: RayResourcePool) -> dict[str, str]:
    """Names what a rank's process must find: this project's packages, and threads.

    Ray gives an actor of one CPU a single thread.
    """
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    threads = {"OMP_NUM_THREADS": str(pool.cpus), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return {**inherited, "PYTHONPATH": path, **threads}
