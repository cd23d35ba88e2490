"""What users' code does to the run's process: it ends it, or doubles it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data.disk_errors import as_os_errors
from data.texts import text_of
from tests.conftest import PROJECT

EXITS = """
import os
from data.own_process import exits_told
import users
with exits_told():
    users.leave({status})
"""
FORKS = """
import os
import torch
from training.observers import ObservedRun, Observer, Observers
from training.reward import compute_reward
from training.run.step_timer import StepTimer
from data.protocol import DataProto
def score(data):
    os.fork()
    return torch.ones(len(data))
class Forks(Observer):
    def checkpoint_saved(self, step):
        os.fork()
def reward():
    compute_reward(DataProto.from_single_dict({{"response_mask": torch.ones(2, 3)}}), score)
def observer():
    Observers(ObservedRun(config=None, run_dir=None), {{"mine": Forks()}}).checkpoint_saved(1)
def phase():
    with StepTimer()("adv"):
        os.fork()
def raising():
    try:
        with StepTimer()("adv"):
            if os.fork() == 0:
                raise SystemExit(0)
    except SystemExit:
        pass
print("begins")
{what}()
print("goes on")
try:
    os.wait()
except ChildProcessError:
    pass
"""


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={"PYTHONPATH": f"{PROJECT}:{folder}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(("status", "code"), [(0, 1), (3, 3)])
def test_os_exit_in_users_code_is_told_and_is_never_success(
    tmp_path: Path, status: int, code: int
) -> None:
    (tmp_path / "users.py").write_text("import os\ndef leave(status):\n    os._exit(status)\n")
    done = _run(EXITS.format(status=status), tmp_path)
    assert done.returncode == code
    assert f"os._exit({status}) was called in {tmp_path}/users.py:3" in done.stderr


def test_os_exit_in_a_thread_and_in_a_forked_child(tmp_path: Path) -> None:
    (tmp_path / "users.py").write_text(
        "import os, threading\n"
        "def leave(status):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os._exit(0)\n"
        "    print(os.waitpid(child, 0)[1], flush=True)\n"
        "    thread = threading.Thread(target=os._exit, args=(0,))\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    done = _run(EXITS.format(status=0), tmp_path)
    assert done.stdout == "0\n"
    assert done.returncode == 1
    assert done.stderr.count("did not come to its end") == 1


@pytest.mark.parametrize("what", ["reward", "observer", "phase", "raising"])
def test_a_child_that_users_code_forks_does_not_go_on_with_the_run(
    tmp_path: Path, what: str
) -> None:
    done = _run(FORKS.format(what=what), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "begins\ngoes on\n"
    assert done.stderr.count("its child returned into the run") == 1, done.stderr


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Leaves(Exception):
    def __str__(self) -> str:
        raise SystemExit(0)


class Numbered(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Mute, Leaves, Numbered])
def test_an_error_that_cannot_say_what_it_is_has_a_sentence(kind: type[Exception]) -> None:
    assert text_of(kind()).startswith("(its __str__ raised ")
    assert text_of(ValueError("a\ud800")) == "a?"
    assert text_of(KeyError("x"), repr) == "KeyError('x')"
    with pytest.raises(kind), as_os_errors(Path("x")):
        raise kind
