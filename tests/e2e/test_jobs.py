"""Batch jobs, run for real.

A Slurm of two nodes on this machine preempts a run, and starts it again.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from custom.confine import die_with_parent
from tests.conftest import PROJECT
from tests.e2e.test_resume import steps_logged
from tests.e2e.test_training import read_steps

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
PATH = f"{os.environ['PATH']}:/usr/sbin"
PATIENCE_S = 150.0

# Two nodes on one machine, which differ in their ports; `urgent` takes the nodes of `low`, whose
# jobs are told so a minute before, by SIGTERM to their steps: what Slurm does unless it is set up
# otherwise.
CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=1
FirstJobId={first}
KillWait=10
ReturnToService=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE \\
OverSubscribe=EXCLUSIVE
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF OverSubscribe=EXCLUSIVE
"""


def until(reached: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not {what} after {seconds:.0f} s"
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


class Slurm:
    """A cluster of two nodes on this machine; `environment` is what its commands need."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        own = {
            "ports": free_ports(3),
            "first": random.randrange(10**6, 6 * 10**7),
            "cpus": os.cpu_count(),
        }
        conf = CONF.format(host=socket.gethostname(), folder=folder, **own)
        (folder / "slurm.conf").write_text(conf)
        own = {
            "PATH": PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "VENV": sys.prefix,
        }
        self.environment = {**os.environ, **own}
        kinds = ("socket", "key-file", "pid-file", "seed-file", "log-file")
        munge = [
            f"--{kind}={folder}/munge.{kind.split('-')[0].replace('socket', 'sock')}"
            for kind in kinds
        ]
        self.daemons = [self.start("munged", "--foreground", "--force", *munge)]
        until((folder / "munge.sock").exists, "listening")
        self.daemons += [self.start("slurmctld", "-D", "-i")]
        self.daemons += [self.start("slurmd", "-D", "-N", node) for node in ("node1", "node2")]
        until(lambda: self.ask("sinfo", "--noheader", "--format=%T") == "idle", "ready")

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out").open("ab") as out:
            ours = {
                "env": self.environment,
                "start_new_session": True,
                "preexec_fn": die_with_parent,
            }
            return subprocess.Popen(command, stdout=out, stderr=out, **ours)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, cwd=PROJECT, timeout=60
        )
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, ExitCode …"""
        return dict(
            word.split("=", 1)
            for word in self.ask("scontrol", "show", "job", "-o", job).split()
            if "=" in word
        )

    def end(self) -> None:
        self.ask("scancel", "--user=root")
        with suppress(AssertionError):
            until(lambda: not self.ask("squeue", "--noheader"), "empty", seconds=45.0)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(timeout=30)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]:
        pytest.skip(
            f"no Slurm here ({', '.join(missing)}): "
            "apt-get install slurmctld slurmd slurm-client munge"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd wants to be root")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster
    finally:
        cluster.end()


def submit(slurm: Slurm, options: list[str], task: Path, run_dir: Path, *overrides: str) -> str:
    argv = [
        "configs/tiny_prompts.yaml",
        f"data.train_files={task}/train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={task}/model",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.logger=[console,file]",
        "trainer.save_freq=1000",
    ]
    script = [
        "sbatch",
        "--parsable",
        f"--output={run_dir}.log",
        *options,
        "configs/jobs/slurm.sbatch",
    ]
    return slurm.ask(*script, *argv, *overrides)


def left_of(job: str) -> list[str]:
    """Processes of the job's Ray, and its files that only a running job has."""
    processes = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    files = [Path(f"/tmp/ray-{job}"), PROJECT / f"outputs/jobs/{job}/token"]
    return [" ".join(words) for words in processes if f"/ray-{job}/" in " ".join(words)] + [
        str(file) for file in files if file.exists()
    ]


def test_a_run_on_two_nodes_is_preempted_saves_and_goes_on(
    slurm: Slurm, tiny_task: Path, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "run.log"
    job = submit(
        slurm,
        ["--nodes=2"],
        tiny_task,
        run_dir,
        "trainer.total_training_steps=25",
        "trainer.resume_mode=disable",
    )
    until(lambda: steps_logged(run_dir) >= 2, "training")
    slurm.ask("sbatch", "--partition=urgent", "--nodes=2", "--output=/dev/null", "--wrap=sleep 1")
    until(lambda: slurm.state(job)["Restarts"] == "1", "requeued", seconds=60.0)
    reached = steps_logged(run_dir)
    until(lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED"), "done")
    said = log.read_text()
    assert slurm.state(job)["JobState"] == "COMPLETED", said[-3000:]
    assert "saving, then requeue" in said and f"saved step {reached} in" in said
    assert [step["step"] for step in read_steps(run_dir)] == list(range(1, 26))
    # It did go on: a run that begins sets the metrics of the one before aside.
    assert 2 <= reached < 25 and not (run_dir / "metrics.jsonl.old").exists()
    assert left_of(job) == []


def test_on_one_node_a_stranger_is_refused_and_a_signal_saves_and_ends_the_job(
    slurm: Slurm, tiny_task: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(
        slurm,
        ["--nodes=1", "--cpus-per-task=2"],
        tiny_task,
        run_dir,
        "trainer.total_training_steps=1000",
    )
    until(lambda: steps_logged(run_dir) >= 2, "training")
    token = PROJECT / f"outputs/jobs/{job}/token"
    assert token.stat().st_mode & 0o777 == 0o600
    visit = "import ray, sys; ray.init(address=sys.argv[1]); print(len(ray.nodes()))"
    address = f"127.0.0.1:{20000 + int(job) % 6000 * 2}"
    answers = []
    for held in (token.read_text(), "0" * 64):
        environment = {**slurm.environment, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": held}
        command = [sys.executable, "-c", visit, address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
        answers.append(
            (
                done.returncode == 0,
                "InvalidAuthToken" in done.stderr or "auth" in done.stderr.lower(),
            )
        )
    assert answers[0][0] and answers[1] == (False, True)
    slurm.ask("scancel", "--batch", "--signal=USR2", job)
    until(lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED"), "ended")
    state, step = slurm.state(job), steps_logged(run_dir)
    assert (state["ExitCode"], state["Restarts"]) == ("143:0", "0")
    assert (run_dir / "latest_checkpointed_iteration.txt").read_text() == str(step)
    assert left_of(job) == []


# In the place of Ray's program on nodes whose number it is given; it says how often it was started.
BROKEN_RAY = """#!/usr/bin/env bash
echo started >>{folder}/started
if ((SLURM_PROCID == {node})); then
    sleep 4
    echo "no room for Ray here" >&2
    exit 1
fi
exec {ray} "$@"
"""


def broken_venv(folder: Path, node: int) -> Path:
    """Makes a virtual environment whose Ray does not start on one node."""
    programs = folder / "venv/bin"
    programs.mkdir(parents=True)
    python = programs / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    ray = programs / "ray"
    ray.write_text(BROKEN_RAY.format(folder=folder, node=node, ray=Path(sys.prefix, "bin/ray")))
    for program in (python, ray):
        program.chmod(0o755)
    return folder / "venv"


# Ways in which Ray on the second node is lost without a word; the shell is the script's own.
LOST_RAY = {
    "its shell is killed": "sleep 2; kill -KILL $PPID; exec sleep 900",
    "its step is killed": "sleep 2; scancel --signal=KILL $SLURM_JOB_ID.$SLURM_STEP_ID; sleep 900",
    "it hangs": "exec sleep 900",
}


@contextmanager
def altered(slurm: Slurm, **variables: str) -> Iterator[None]:
    """Has jobs find other variables in their environment."""
    before = dict(slurm.environment)
    slurm.environment |= variables
    try:
        yield
    finally:
        slurm.environment = before


def end_of_a_job_on_two_nodes(
    slurm: Slurm, task: Path, run_dir: Path
) -> tuple[dict[str, str], str]:
    """Returns how a job ends that is not requeued, and what it said."""
    job = submit(slurm, ["--nodes=2"], task, run_dir)
    try:
        until(lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED"), "ended")
        # A requeued job would be pending.
        time.sleep(3)
    finally:
        slurm.ask("scancel", job)
    state = slurm.state(job)
    said = Path(f"{run_dir}.log").read_text()
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0"), said
    assert "notice" not in said
    return state, said


@pytest.mark.parametrize("how", list(LOST_RAY))
def test_ray_that_is_lost_on_a_node_fails_the_job_which_is_not_requeued(
    slurm: Slurm, tiny_task: Path, tmp_path: Path, how: str
) -> None:
    venv = broken_venv(tmp_path, node=1)
    real = Path(sys.prefix, "bin/ray")
    lost = (
        f'#!/usr/bin/env bash\n((SLURM_PROCID == 1)) && {{ {LOST_RAY[how]}; }}\nexec {real} "$@"\n'
    )
    (venv / "bin/ray").write_text(lost)
    with altered(slurm, VENV=str(venv), RAY_WAIT="60"):
        end_of_a_job_on_two_nodes(slurm, tiny_task, tmp_path / "run")


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_on_which_ray_does_not_start_fails_the_job_which_is_not_requeued(
    slurm: Slurm, tiny_task: Path, tmp_path: Path, node: int
) -> None:
    with altered(slurm, VENV=str(broken_venv(tmp_path, node))):
        state, said = end_of_a_job_on_two_nodes(slurm, tiny_task, tmp_path / "run")
    assert state["ExitCode"] == "1:0", said
    assert "Ray has not started on all of" in said
    assert left_of(str(state["JobId"])) == []


def test_a_job_that_is_started_again_without_a_new_checkpoint_fails(
    slurm: Slurm, tiny_task: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(slurm, ["--nodes=1"], tiny_task, run_dir, "trainer.max_requeues=0")
    until(lambda: Path(f"/tmp/ray-{job}").exists(), "starting")
    # As Slurm does of itself where a node is lost; a requeued job waits, unless it is told not to.
    slurm.ask("scontrol", "requeue", job)
    until(lambda: slurm.state(job)["JobState"] == "PENDING", "requeued")
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED"), "ended", 2 * PATIENCE_S)
    state, said = slurm.state(job), Path(f"{run_dir}.log").read_text()
    assert (state["JobState"], state["Restarts"], state["ExitCode"]) == ("FAILED", "1", "1:0"), said
    assert "without a new checkpoint: it fails now (trainer.max_requeues)" in said
    assert not (run_dir / "latest_checkpointed_iteration.txt").exists()
    assert left_of(job) == []


def test_a_setting_that_does_not_exist_is_found_before_ray_starts(
    slurm: Slurm, tiny_task: Path, tmp_path: Path
) -> None:
    job = submit(slurm, ["--nodes=2"], tiny_task, tmp_path / "run", "trainer.total_steps=3")
    until(lambda: slurm.state(job)["JobState"] in ("COMPLETED", "FAILED"), "ended")
    assert slurm.state(job)["ExitCode"] == "2:0"
    assert "trainer.total_steps" in (tmp_path / "run.log").read_text()
    assert [file.name for file in (PROJECT / f"outputs/jobs/{job}").iterdir()] == ["settings.txt"]
    assert left_of(job) == []


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_scancel_leaves_no_token_and_no_folder(
    slurm: Slurm, tiny_task: Path, tmp_path: Path, moment: str
) -> None:
    run_dir = tmp_path / "run"
    steps = "trainer.total_training_steps=1000"
    job = submit(slurm, ["--nodes=2"], tiny_task, run_dir, steps)
    if moment == "training":
        until(lambda: steps_logged(run_dir) >= 2, "training")
    else:
        until(Path(f"/tmp/ray-{job}").exists, "starting")
    slurm.ask("scancel", job)
    until(lambda: slurm.ask("squeue", "--noheader") == "", "gone", seconds=60.0)
    assert left_of(job) == []
