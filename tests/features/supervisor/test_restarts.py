"""What the supervisor returns, and what it starts again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from training.run.exit_codes import MEND, OUT_OF_MEMORY

ATTEMPT = """
import os, sys
print("attempt", os.environ["PPO_CORE_ATTEMPT"], file=sys.stderr)
code = int(sys.argv[-1])
if code > 128:
    os.kill(os.getpid(), code - 128)
sys.exit(code)
"""
SUPERVISE = """
import sys
from pathlib import Path
from features.supervisor.supervisor import Supervisor
from training.config.loader import load_config
folder, code, config = sys.argv[1:]
words = [f"trainer.default_local_dir={folder}/run", "supervisor.max_restarts=1"]
loaded = load_config([config, *words], check=False)
supervisor = Supervisor(loaded.config, Path(folder, "attempt.py"), [])
supervisor._overrides = lambda: [code]
sys.exit(supervisor.run())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "attempts"), [(0, 1), (2, 1), (MEND, 1), (1, 2), (OUT_OF_MEMORY, 2), (75, 2), (137, 2)]
)
def test_the_supervisor_ends_as_the_last_attempt_did(
    tmp_path: Path, code: int, attempts: int
) -> None:
    (tmp_path / "attempt.py").write_text(textwrap.dedent(ATTEMPT))
    config = str(PROJECT / "configs/tiny_prompts.yaml")
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, str(tmp_path), str(code), config],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("attempt ") == attempts


ENDS_UNSEEN = """
import ctypes, os
from pathlib import Path
from training.run.run_lock import run_lock
attempt = os.environ["PPO_CORE_ATTEMPT"]
print("attempt", attempt)
with run_lock(Path(__file__).parent / "run"):
    if attempt == "1":
        ctypes.CDLL(None)._exit(0)
"""


@pytest.mark.long
def test_an_attempt_that_is_ended_with_code_0_before_its_end_is_started_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "attempt.py").write_text(ENDS_UNSEEN)
    config = str(PROJECT / "configs/tiny_prompts.yaml")
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISE, str(tmp_path), "0", config],
        cwd=PROJECT,
        env=os.environ | {"PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "exit code 0 before the run's end" in done.stderr
    assert "restart 1 of 1: the run failed (exit code 1" in done.stderr


LIMITED = """
import os, sys
from pathlib import Path
if os.environ["PPO_CORE_ATTEMPT"] == "1":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    block = bytearray(400 << 20)
    block[::4096] = b"x" * len(block[::4096])
print(*sys.argv[2:])
sys.exit(3)
"""
SUPERVISE_LIMITED = """
import sys
from pathlib import Path
from features.supervisor.supervisor import Supervisor
from training.config.loader import load_config
words = [f"trainer.default_local_dir={sys.argv[1]}/run", "supervisor.max_restarts=1"]
config = load_config([sys.argv[3], *words], check=False).config
sys.exit(Supervisor(config, Path(sys.argv[1], "limited.py"), [sys.argv[2]]).run())
"""


@pytest.mark.seconds
def test_a_run_that_the_system_kills_for_memory_is_restarted_with_half_the_budget(
    tmp_path: Path,
) -> None:
    """A group of processes of 60 MB, where the system ends who takes more."""
    group = Path(f"/sys/fs/cgroup/memory/ppo_test_{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("60M")
    except OSError:
        pytest.skip("no group of processes can be made here")
    try:
        (tmp_path / "limited.py").write_text(LIMITED)
        command = [sys.executable, "-c", SUPERVISE_LIMITED, str(tmp_path), str(group)]
        config = str(PROJECT / "configs/tiny_prompts.yaml")
        done = subprocess.run(
            [*command, config], cwd=PROJECT, capture_output=True, text=True, timeout=120
        )
    finally:
        group.rmdir()
    assert done.returncode == 3, done.stderr
    assert "the system killed the run: memory ran out" in done.stderr
    assert "the run ran out of memory (exit code 4" in done.stderr
    assert re.search(r"actor\.ppo_max_token_len_per_gpu=\d+", done.stdout), done.stdout
