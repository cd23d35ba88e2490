"""The run as a process: signals that end it through its clean-up, and Ray's start and end.

Last come restarts: with `trainer.max_restarts` a process of its own runs the command line, and runs it again where it
fails, so that no way to end, a segmentation fault and the system's lack of memory included, takes the run with it.
Invariant: however a run ends, but by SIGKILL, its clean-up runs once and whole, and Ray's processes end with it; what
descends from an attempt is gone before the next begins, wherever it has gone to; a signal reaches an attempt once.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil

from custom.confine import adopt_orphans, die_with_parent
from data.texts import say
from data.watch import ATTEMPT, STALLED, end_children
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
# Exit codes of a run: what is to be mended by its user (beside 2, settings), and that memory ran out.
MEND, OUT_OF_MEMORY = 3, 4
# Nothing is gained by another attempt, or it was told to end.
FINAL = (0, 2, MEND, *(128 + number for number in ENDING))


def handle(handlers: Mapping[signal.Signals, Any]) -> None:
    """Sets the handler of each signal, where this is the main thread; only that can."""
    for number, handler in (
        handlers.items() if threading.current_thread() is threading.main_thread() else ()
    ):
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
        self.others = {
            number: other
            for number in ENDING
            if (other := signal.getsignal(number)) is not signal.SIG_IGN
        }
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
        # A scheduler may tell every process of a job, and the one that watches over this one hands it on: that is one.
        echo = number == signal.SIGTERM == self.received and time.monotonic() - self.when < 2.0
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
        logger.warning(
            say("busy_cores", threads=threads, free=free, cores=cores, better=max(1, round(free)))
        )


def give_signals_back() -> None:
    """Lets the signals end the process again: what a user's own threads still hold up can be ended then."""
    handle(dict.fromkeys(ENDING, signal.SIG_DFL))


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
        settings = {
            "include_dashboard": False,
            "num_cpus": config.trainer.all_ranks,
            **settings,
            "address": "local",
        }
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


class Supervisor:
    """Runs `python PROGRAM argv` as often as it fails and `trainer.max_restarts` allows.

    The first attempt resumes as the config says, the others from what the run itself has saved, if it has.
    """

    def __init__(self, config: PPOConfig, program: Path, argv: list[str]) -> None:
        self.config, self.argv = config, [sys.executable, str(program), *argv]
        # Imports torch: late.
        from training.run.checkpoint import LATEST

        self.latest = Path(config.trainer.run_dir).absolute() / LATEST
        self.before = self._written()
        self.received = 0
        self.child: subprocess.Popen[bytes] | None = None
        # Settings that an attempt's end has changed.
        self.own: dict[str, str | int] = {}

    def run(self) -> int:
        """Runs to the end; returns the exit code of the last attempt."""
        adopt_orphans()
        handle(
            {
                number: self._pass_on
                for number in ENDING
                if signal.getsignal(number) is not signal.SIG_IGN
            }
        )
        most = self.config.trainer.max_restarts
        for number in range(1, most + 2):
            code = self._attempt(number)
            if self.received or code in FINAL or number > most:
                break
            if self._written() not in (0, self.before):
                self.own["trainer.resume_mode"] = "auto"
            if code == OUT_OF_MEMORY:
                self._halve_budgets()
            start = (
                f"step {self.latest.read_text()}"
                if "trainer.resume_mode" in self.own
                else "where it began"
            )
            end = {STALLED: "stalled", OUT_OF_MEMORY: "ran out of memory"}.get(code, "failed")
            own = (
                " ".join(f"{key}={value}" for key, value in self.own.items()) or "the same settings"
            )
            logger.warning(
                say("restarts", number=number, most=most, end=end, code=code, start=start, own=own)
            )
        return code

    def _attempt(self, number: int) -> int:
        """Runs the command line once, until nothing of it is left; returns its exit code, as a shell would say it."""
        # A session of its own: a terminal's signals then come here alone, and go on from here.
        self.child = subprocess.Popen(
            [*self.argv, *(f"{key}={value}" for key, value in self.own.items())],
            env=os.environ | {ATTEMPT: str(number)},
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        if self.received:
            self.child.send_signal(self.received)
        code = self.child.wait()
        end_children()
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: object) -> None:
        self.received = number
        if self.child is not None:
            self.child.send_signal(number)

    def _written(self) -> int:
        return self.latest.stat().st_mtime_ns if self.latest.exists() else 0

    def _halve_budgets(self) -> None:
        """Halves the token budgets of updates, which several ranks cannot do while they run; a row must fit."""
        sections = {
            "actor_rollout_ref.actor": self.config.actor_rollout_ref.actor,
            "critic": self.config.critic,
        }
        for section, model in sections.items():
            key = f"{section}.ppo_max_token_len_per_gpu"
            before = int(self.own.get(key, model.ppo_max_token_len_per_gpu))
            self.own[key] = max(before // 2, self.config.data.row_length)
