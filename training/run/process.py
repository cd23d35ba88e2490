"""The run as a process: signals that end it through its clean-up, a cut pipe that is no error, and Ray's start and end.

Invariant: however a run ends, but by SIGKILL, its clean-up runs once and whole, and Ray's processes end with it.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import psutil

from data.texts import say
from training.config import PPOConfig
from training.config.settings import TrainerConfig

logger = logging.getLogger(__name__)
# Of Ray's environment, for a cluster of the run's own.
OWN_CLUSTER = {
    # What keeps it on loopback, on any system; a `_node_ip_address` of 127.0.0.1 is replaced by one that others reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Seconds for which a run whose cluster was killed hangs.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
}
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0  # for Ray's processes to end by themselves
# A scheduler may tell every process of a job, and the one that watches over this one hands it on: that is one SIGTERM.
ECHO_S = 2.0


def handle(handlers: Mapping[signal.Signals, Any]) -> None:
    """Sets the handler of each signal, where this is the main thread; only that can."""
    for number, handler in handlers.items() if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, handler)


class EndingSignals:
    """Turns Ctrl-C, SIGTERM and SIGHUP into KeyboardInterrupt, which ends the run through its `finally` blocks.

    While `postpone()` is true the first of them only sets `received`, and the run ends by itself when its step is done.
    What comes after `close` is ignored, since the clean-up takes but seconds and must be whole. A signal that is
    ignored already (nohup) stays so. As a context manager it gives the signals back at the end.
    """

    def __init__(self) -> None:
        self.received, self.open, self.when = 0, True, 0.0
        self.postpone: Callable[[], bool] = lambda: False

    def install(self) -> None:
        """Takes the signals over; only the main thread can."""
        self.others = {number: other for number in ENDING if (other := signal.getsignal(number)) is not signal.SIG_IGN}
        handle(dict.fromkeys(self.others, self._end))

    def __enter__(self) -> Self:
        self.received, self.open = 0, True
        self.install()
        return self

    def __exit__(self, *error: object) -> None:
        handle(self.others)

    def close(self) -> None:
        """Ignores what comes from now on."""
        self.open = False

    def _end(self, number: int, frame: object) -> None:
        echo = number == signal.SIGTERM == self.received and time.monotonic() - self.when < ECHO_S
        if echo or not self.open:
            return
        later = not self.received and self.postpone()
        self.received, self.when = number, time.monotonic()
        how = "ending the run after this step; once more: at once" if later else "ending the run"
        # Not print: the signal may have come in the midst of one.
        os.write(2, f"\n{signal.Signals(number).name}: {how}\n".encode())
        if not later:
            raise KeyboardInterrupt


def say_busy_cores() -> None:
    """Warns where PyTorch's threads outnumber the cores that nobody uses: they wait for each other, spinning."""
    import torch

    threads, cores = torch.get_num_threads(), psutil.cpu_count() or 1
    free = cores * (1 - psutil.cpu_percent(interval=0.2) / 100)
    if threads > 1 and threads > free + 0.7:
        logger.warning(say("busy_cores", threads=threads, free=free, cores=cores, better=max(1, round(free))))


def give_signals_back() -> None:
    """Lets the signals end the process again: what a user's own threads still hold up can be ended then."""
    handle(dict.fromkeys(ENDING, signal.SIG_DFL))


@contextmanager
def closed_pipe_is_no_error() -> Iterator[None]:
    """Lets what the block prints be cut short by its reader, as with `| head`."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is flushed at the end goes there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None


def has_gpus(trainer: TrainerConfig) -> bool:
    """Says whether ranks are to have GPUs: those of Ray's nodes, of which the driver's own may have none."""
    import torch

    if trainer.device is not None:
        return trainer.device == "cuda"
    if not trainer.use_ray:
        return torch.cuda.is_available()
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


@contextmanager
def ray_cluster(config: PPOConfig) -> Iterator[None]:
    """Runs Ray for the block, where the config asks for it: `ray_init.address`, or a cluster of its own on loopback.

    One that this process is connected to already is used, and left running.
    """
    if not config.trainer.use_ray or ("ray" in sys.modules and sys.modules["ray"].is_initialized()):
        yield
        return
    settings = dict(config.ray_kwargs.ray_init)
    if settings.get("address") in (None, "local"):
        # Logical CPUs only count ranks; how many threads a rank has is set with its process. Without "local" a cluster
        # that `ray start` or RAY_ADDRESS left here would be taken.
        settings = {"include_dashboard": False, "num_cpus": config.trainer.all_ranks, **settings, "address": "local"}
        for name, value in OWN_CLUSTER.items():
            os.environ.setdefault(name, value)
    import ray

    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        ray.init(**settings)
        # Ray has put a handler of its own.
        handle(handlers)
        yield
    finally:
        started = psutil.Process().children(recursive=True)
        ray.shutdown()
        for process in psutil.wait_procs(started, timeout=GRACE_S)[1]:
            process.kill()
