"""Judges answers by reasoning-gym's verifiers in a process of their own: many of them execute what the policy wrote.

Invariant: an answer that a verifier trips over, or takes too long for, scores 0; whatever it does, the trainer goes on.
"""

import functools
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from custom.confine import Limits, confine, die_with_parent
from custom.env import check_reward

logger = logging.getLogger(__name__)
DEADLINE_S = 10.0
# Its first answer waits for the library's import.
START_S = 120.0
LIMITS = Limits(network=False, memory_gb=4.0)
START = "import sys; sys.path.insert(0, sys.argv[1]); from custom.verifier import serve; serve()"


class VerifierProcess:
    """Asks the process, which starts with the first answer, and again after one that it did not survive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def score(self, name: str, answer: str, entry: str) -> float:
        """Returns the score of an answer to a task's entry (JSON), 0 to 1. Raises ValueError for an unknown task."""
        with self._lock:
            first = self._process is None or self._process.poll() is not None
            process = self._start() if first else self._process
            assert process is not None and process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps([name, answer, entry]).encode() + b"\n")
                process.stdin.flush()
                ready = select.select([process.stdout], [], [], START_S if first else DEADLINE_S)[0]
                line = process.stdout.readline() if ready else b""
            except BrokenPipeError:
                line = b""
            if not line:
                process.kill()
                process.wait()
                logger.warning(
                    "%s: the verifier did not survive the answer %r, which scores 0", name, (answer or "")[:80]
                )
                return 0.0
        reply = json.loads(line)
        if "refused" in reply:
            raise ValueError(reply["refused"])
        return reply["score"]

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", START, str(Path(__file__).resolve().parents[1])]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        return self._process


def serve() -> None:
    """Answers questions on the standard input, in the process."""
    die_with_parent()
    confine(LIMITS)
    # What a verifier prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_judged(*json.loads(line))) + "\n")
        answers.flush()


def _judged(name: str, answer: str | None, entry: str) -> dict[str, Any]:
    try:
        verifier = _verifier(name)
    except ValueError as error:
        return {"refused": str(error)}
    return {"score": judge(verifier, answer, json.loads(entry))[0]}


def judge(
    verifier: Callable[[str | None, dict[str, Any]], Any], answer: str | None, entry: dict[str, Any]
) -> tuple[float, str]:
    """Returns (score, error): the verifier's score; 0 and what was wrong, where it raises or gives no finite number."""
    try:
        return check_reward(verifier(answer, entry), "the verifier"), ""
    # Many verifiers evaluate, convert or parse what the policy wrote; a deadline (BaseException) goes on.
    except Exception as error:
        return 0.0, f"{type(error).__name__}: {error}"[:200]


@functools.cache
def _verifier(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)
