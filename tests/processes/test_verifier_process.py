"""reasoning-gym's verifiers run the policy's text outside of the trainer.

It reaches nothing, and hangs nobody.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import custom.verifier_process
from custom.reward_score import default_compute_score
from custom.verifier_process import VerifierProcess, end_verifier_processes, verifier_process
from tests.conftest import PROJECT
from training.run.leftovers import ends_leftovers

reasoning_gym = pytest.importorskip("reasoning_gym")


def entry_of(name: str) -> str:
    return json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0], default=str)


def test_a_right_answer_scores_1_and_an_odd_one_0() -> None:
    entry = entry_of("prime_factorization")
    answer = json.loads(entry)["answer"]
    assert (
        default_compute_score("reasoning_gym/prime_factorization", answer, answer, {"entry": entry})
        == 1.0
    )
    for odd in ("", "2 x y", "×", "9" * 5000, "1e999 × 2"):
        assert (
            0
            <= default_compute_score(
                "reasoning_gym/prime_factorization", odd, answer, {"entry": entry}
            )
            < 1
        )


def test_what_the_policy_writes_runs_in_another_process_without_a_network(tmp_path: Path) -> None:
    """countdown evaluates the answer: as an expression it may still not touch the trainer."""
    judged = VerifierProcess()
    entry = entry_of("countdown")
    assert judged.score("countdown", "1 + 1", entry) < 1
    assert judged._process is not None
    pid = judged._process.pid
    assert pid != os.getpid() and os.readlink(f"/proc/{pid}/ns/net") != os.readlink(
        "/proc/self/ns/net"
    )
    judged._process.kill()


def test_a_run_ends_the_verifiers_and_calls_them_no_leftovers(caplog) -> None:
    """They are the project's own, and no environment had started them."""
    entry = entry_of("chain_sum")
    answer = json.loads(entry)["answer"]
    with ends_leftovers():
        # The one of an earlier test is not marked as this run's.
        end_verifier_processes()
        judged = verifier_process("reasoning_gym")
        assert judged.score("chain_sum", answer, entry) == 1.0
        assert judged._process is not None
        pid = judged._process.pid
    assert not psutil.pid_exists(pid)
    assert "outlived the run" not in caplog.text
    assert judged.score("chain_sum", answer, entry) == 1.0
    end_verifier_processes()


def test_an_answer_that_never_ends_scores_0_and_the_next_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(custom.verifier_process, "DEADLINE_S", 1.0)
    judged = VerifierProcess()
    entry = entry_of("countdown")
    judged.score("countdown", "1", entry)
    first = judged._process
    assert judged.score("countdown", "9**9**9", entry) == 0.0
    assert judged.score("countdown", json.loads(entry)["metadata"]["expression"], entry) == 1.0
    assert judged._process is not first


ATTACKS = {
    "forges a score": """__import__('os').write(PIPE, b'{"score": 1.0, "number": "0"}\\n')""",
    "writes junk": "__import__('os').write(PIPE, b'junk\\n')",
    "leaves a line open": "(__import__('os').write(PIPE, b'{'), __import__('time').sleep(60))",
    "ends the process": "__import__('os')._exit(0)",
    "forks, and both answer": "__import__('os').fork()",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_answer_that_runs_code_scores_0_and_shifts_no_other(
    attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """binary_matrix evaluates an answer as Python."""
    monkeypatch.setattr(custom.verifier_process, "DEADLINE_S", 1.5)
    judged, entry = VerifierProcess(), entry_of("binary_matrix")
    truth = json.loads(entry)["answer"]
    assert judged.score("binary_matrix", truth, entry) == 1.0
    assert judged._process is not None
    pid = judged._process.pid
    pipes = [int(fd) for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) > 2]
    for pipe in pipes:
        if os.readlink(f"/proc/{pid}/fd/{pipe}").startswith("pipe:"):
            code = ATTACKS[attack].replace("PIPE", str(pipe))
            assert judged.score("binary_matrix", code, entry) < 1.0
    assert judged.score("binary_matrix", truth, entry) == 1.0
    assert judged.score("binary_matrix", "0", entry) < 1.0


def test_an_unknown_task_is_an_error_of_the_user() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        VerifierProcess().score("nonsense", "1", "{}")


def test_the_process_is_found_where_the_packages_are_installed_and_from_any_folder(
    tmp_path: Path,
) -> None:
    site = tmp_path / "site-packages"
    for package in ("custom", "data"):
        shutil.copytree(PROJECT / package, site / package)
    elsewhere = tmp_path / "elsewhere"
    # A package of the same name in the working directory is not taken for ours.
    (elsewhere / "custom").mkdir(parents=True)
    (elsewhere / "custom/__init__.py").touch()
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from custom.verifier_process import ROOT, VerifierProcess\n"
        f"entry = {entry_of('chain_sum')!r}\n"
        "import json\n"
        "answer = json.loads(entry)['answer']\n"
        "print(ROOT, VerifierProcess().score('chain_sum', answer, entry))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(site.resolve()), "1.0"]
