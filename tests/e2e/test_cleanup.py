"""What a run over Ray leaves behind, however it ends: no process and no shared memory.

While it runs, nothing listens beyond loopback.
"""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import PROJECT
from tests.e2e.test_resume import listen_to_ctrl_c, steps_logged

pytest.importorskip("ray")
SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 400.0  # for a run to get anywhere, on a busy machine
VANISHING_S = 15.0
TENSOR_PARALLEL = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
)


class WatchedRun:
    """`main.py` on two Ray ranks as a process.

    `seen` are all processes that ever descended from it, also those that outlived their parent.
    """

    def __init__(self, task: Path, folder: Path, *overrides: str) -> None:
        self.folder, self.segments = folder, set(SHARED_MEMORY.iterdir())
        argv = [
            *(sys.executable, str(PROJECT / "main.py"), str(PROJECT / "configs/tiny_prompts.yaml")),
            f"data.train_files={task}/train.parquet",
            "data.val_files=null",
            f"actor_rollout_ref.model.path={task}/model",
            f"trainer.default_local_dir={folder}",
            "data.train_batch_size=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.rollout.max_num_seqs=32",
            "trainer.total_training_steps=1000",
            "trainer.logger=file",
            "trainer.launcher=ray",
            "trainer.n_gpus_per_node=2",
            *overrides,
        ]
        self.log = folder / "stderr"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                argv,
                cwd=PROJECT,
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=listen_to_ctrl_c,
            )
        self.seen = {
            psutil.Process(self.process.pid)
        }  # equal are processes of one id and one start
        self.addresses: set[tuple[str, str]] = set()

    def look(self) -> None:
        ours = {process.pid for process in self.seen}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.ppid() in ours:
                    self.seen.add(process)
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid in ours:
                with suppress(psutil.Error):
                    self.addresses.add(
                        (connection.laddr.ip, " ".join(psutil.Process(connection.pid).cmdline()))
                    )

    def until(self, reached: Callable[[], object]) -> None:
        """Watches until then, or until the run ends."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and not reached():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            self.look()
            time.sleep(0.1)

    def until_training(self) -> None:
        self.until(lambda: steps_logged(self.folder) >= 1)
        assert self.process.poll() is None, self.log.read_text()[-3000:]

    def workers(self) -> list[psutil.Process]:
        """The ranks' processes, by the title that Ray gives them."""
        found = []
        for process in self.seen:
            with suppress(psutil.Error):
                found += [process] if "ray::WorkerHost" in " ".join(process.cmdline()) else []
        return found

    def end(self) -> int:
        """Waits for the end and checks what is left of the run; its exit code."""
        self.until(lambda: False)
        _, alive = psutil.wait_procs(self.seen, timeout=VANISHING_S)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not self.left_segments()
        assert self.addresses, "Ray listens somewhere"
        assert not {found for found in self.addresses if not is_loopback(found[0])}
        return self.process.returncode

    def left_segments(self) -> set[Path]:
        """New entries of /dev/shm, but those of other programs, which a process still maps."""
        new = set(SHARED_MEMORY.iterdir()) - self.segments
        maps = []
        for path in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                maps.append(path.read_text())
        return {
            path for path in new if path.exists() and not any(f"{path}\n" in text for text in maps)
        }

    def kill(self) -> None:
        self.look()
        for process in self.seen:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


Start = Callable[..., WatchedRun]


@pytest.fixture
def start(tiny_task: Path, tmp_path: Path) -> Iterator[Start]:
    runs: list[WatchedRun] = []

    def begin(*overrides: str) -> WatchedRun:
        runs.append(WatchedRun(tiny_task, tmp_path, *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.kill()


def test_ctrl_c_ends_a_training_run_with_a_line_and_a_second_one_changes_nothing(
    start: Start,
) -> None:
    run = start()
    run.until_training()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert "SIGINT: ending the run" in run.log.read_text()
    assert "Traceback" not in run.log.read_text()


def check_killed_worker(run: WatchedRun) -> None:
    run.until_training()
    run.workers()[0].kill()
    killed = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - killed < 60 + VANISHING_S
    log = run.log.read_text()
    assert re.search(
        r"ActorDiedError: (.|\n)*rank [01] of 2, role (actor_rollout|critic), in \w+, step \d", log
    ), log


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_its_rank_and_role(start: Start) -> None:
    check_killed_worker(start())


@pytest.mark.slow
def test_sigterm_ends_a_training_run(start: Start) -> None:
    run = start()
    run.until_training()
    run.process.terminate()
    assert run.end() == 128 + signal.SIGTERM
    assert "Traceback" not in run.log.read_text()


@pytest.mark.slow
def test_ctrl_c_ends_a_run_that_still_starts(start: Start) -> None:
    run = start()
    run.until(run.workers)
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert "Traceback" not in run.log.read_text()
    assert steps_logged(run.folder) == 0


@pytest.mark.slow
def test_an_error_of_the_reward_ends_the_run(start: Start, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "calls = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 9:\n"  # the first is on a made-up answer
        "        raise ValueError('no score in step 2')\n"
        "    return 0.0\n"
    )
    run = start(f"custom_reward_function.path={reward}")
    assert run.end() == 1
    assert "no score in step 2" in run.log.read_text()
    assert steps_logged(run.folder) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", [(), pytest.param(TENSOR_PARALLEL, marks=pytest.mark.vllm)])
def test_a_finished_run_leaves_nothing(start: Start, engine: tuple[str, ...]) -> None:
    if engine:
        pytest.importorskip("vllm")
    run = start("trainer.total_training_steps=2", *engine)
    assert run.end() == 0, run.log.read_text()[-3000:]
    assert steps_logged(run.folder) == 2


@pytest.mark.slow
@pytest.mark.vllm
def test_a_killed_rank_of_a_shared_engine_leaves_no_shared_memory(start: Start) -> None:
    pytest.importorskip("vllm")
    run = start(*TENSOR_PARALLEL)
    run.until_training()
    mapped = "".join(Path(f"/proc/{worker.pid}/maps").read_text() for worker in run.workers())
    segments = re.findall(r"/dev/shm/(?:\S*cpushm\S*|psm_\S*).*", mapped)
    assert len(segments) >= 4  # of each rank, and the queue between them
    assert all(segment.endswith("(deleted)") for segment in segments)
    check_killed_worker(run)


def test_shared_memory_that_is_still_mapped_is_another_programs(tmp_path: Path) -> None:
    """The check above sees what is left, and nothing else."""
    run = WatchedRun.__new__(WatchedRun)
    run.segments = set(SHARED_MEMORY.iterdir())
    left = SHARED_MEMORY / f"left-{os.getpid()}"
    left.write_bytes(b"x")
    try:
        assert run.left_segments() >= {left}
    finally:
        left.unlink()
    assert left not in run.left_segments()
