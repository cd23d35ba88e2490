"""Starts and ends Ray for a run, and looks at what the machine has.

Invariant: Ray's processes end with the run that started them.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from training.config import PPOConfig
from training.config.schema.trainer import TrainerConfig
from training.run.signals import ENDING_SIGNALS, SignalsSeen, set_handlers

logger = logging.getLogger(__name__)
# Ray's environment variables, for a cluster of the run's own.
OWN_CLUSTER = {
    # This keeps it on loopback, on any system; a `_node_ip_address` of 127.0.0.1 is replaced by one
    # that others reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Seconds for which a run whose cluster was killed hangs.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
}
# For Ray's processes to end by themselves.
GRACE_S = 5.0
# How long the cores are watched, and how many of them one may misjudge.
WATCH_CORES_S = 0.2
SPARE_CORES = 0.7


@contextmanager
def ray_cluster(config: PPOConfig) -> Iterator[None]:
    """Runs Ray for the block, where the config asks for it.

    It joins `ray_init.address`, or starts a cluster of its own on loopback. One that this process
    is connected to already is used, and left running.
    """
    if not config.trainer.use_ray or _is_connected():
        yield
        return
    settings = _ray_settings(config)
    import ray

    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        with SignalsSeen() as seen:
            try:
                ray.init(**settings)
            except SystemExit:
                # Ray's own handler raised it: the signal was for the run.
                if signal.SIGTERM not in seen:
                    raise
            finally:
                set_handlers(handlers)
            # Also where Ray's SystemExit was lost, since it came in the midst of a `__del__`.
            if signal.SIGTERM in seen:
                signal.raise_signal(signal.SIGTERM)
        yield
    finally:
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=GRACE_S)
        for process in alive:
            process.kill()


def _is_connected() -> bool:
    """Checks whether this process has called ray.init, without importing Ray."""
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _ray_settings(config: PPOConfig) -> dict[str, Any]:
    """Fills in what a cluster of the run's own needs, also in the environment."""
    settings = dict(config.ray_kwargs.ray_init)
    if settings.get("address") not in (None, "local"):
        return settings
    for name, value in OWN_CLUSTER.items():
        os.environ.setdefault(name, value)
    # Logical CPUs only count ranks; how many threads a rank has is set with its process.
    settings.setdefault("num_cpus", config.trainer.all_ranks)
    settings.setdefault("include_dashboard", False)
    # Without "local" a cluster that `ray start` or RAY_ADDRESS left here would be joined.
    settings["address"] = "local"
    return settings


def has_gpus(trainer: TrainerConfig) -> bool:
    """Checks whether ranks are to have GPUs.

    Those are of Ray's nodes, of which the driver's own may have none.
    """
    import torch

    if trainer.device is not None:
        return trainer.device == "cuda"
    if not trainer.use_ray:
        return torch.cuda.is_available()
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def warn_of_busy_cores() -> None:
    """Warns where PyTorch's threads outnumber the free cores.

    They wait for each other, spinning.
    """
    import torch

    threads = torch.get_num_threads()
    cores = psutil.cpu_count() or 1
    free = cores * (1 - psutil.cpu_percent(interval=WATCH_CORES_S) / 100)
    if threads > 1 and threads > free + SPARE_CORES:
        logger.warning(
            "%s threads, but about %.1f of %s cores are free: where threads share cores a step can "
            "take many times as long; OMP_NUM_THREADS=%s, or wait for what else runs",
            threads,
            free,
            cores,
            max(1, round(free)),
        )
