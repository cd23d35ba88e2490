"""Judges answers by the verifiers of packages, in a process of their own: some of them execute what the policy wrote.

Invariant: an answer that a verifier trips over, or takes too long for, scores 0; whatever it does, the trainer goes on:
it reads what the process sends as data, up to a deadline, and ends the process where that is not one answer.
"""

import functools
import importlib
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, TypeAlias

from custom.confine import Limits, adopt_orphans, confine, die_with_parent, kill_tree
from custom.env import check_reward

# Judges an answer (None: there is none) to a task's entry.
Verifier: TypeAlias = Callable[[str | None, dict[str, Any]], Any]

logger = logging.getLogger(__name__)
# For an answer, and for the process to be ready for the first.
DEADLINE_S, START_S = 10.0, 120.0
LONGEST_REPLY = 10_000
LIMITS = Limits(network=False, memory_gb=4.0)
START = "import sys; sys.path.insert(0, sys.argv[1]); from custom.verifier import serve; serve(sys.argv[2])"


class VerifierProcess:
    """Asks the process, which starts with the first answer, and again after one that it did not survive.

    Args:
        package: whose verifiers judge: reasoning_gym, by the task's name; math_verify, whose only task is "math".
    """

    def __init__(self, package: str = "reasoning_gym") -> None:
        self.package = package
        self._lock = threading.Lock()
        self._process: Any = None

    def score(self, name: str, answer: str, entry: str) -> float:
        """Returns the score of an answer to a task's entry (JSON), 0 to 1. Raises ValueError for an unknown task."""
        # It tells the reply from what an answer may have written before.
        number = secrets.token_hex(8)
        with self._lock:
            try:
                self._ready()
                self._process.stdin.write(json.dumps([number, name, answer, entry]).encode() + b"\n")
                answered, score, refused = self._read(DEADLINE_S)
                if answered != number:
                    raise ValueError("it sent another answer's reply")
                score = check_reward(score, "the verifier")
            except (OSError, ValueError, TypeError) as error:
                self._end()
                logger.warning("%s: an answer scores 0, as the verifier did not survive it: %s", name, error)
                return 0.0
        if refused:
            raise ValueError(str(refused))
        return score

    def _ready(self) -> None:
        """Starts the process where there is none, and waits until it is ready for an answer."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [sys.executable, "-c", START, str(Path(__file__).resolve().parents[1]), self.package]
            self._process = Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True, bufsize=0)
            self._read(START_S)

    def _read(self, seconds: float) -> Any:
        """Reads the one line that is to come; ValueError where it is late, too long or no JSON."""
        deadline = threading.Timer(seconds, kill_tree, [self._process.pid])
        deadline.start()
        try:
            line = self._process.stdout.readline(LONGEST_REPLY)
        finally:
            deadline.cancel()
        if not line.endswith(b"\n"):
            raise ValueError(f"it ended, or wrote no line within {seconds:g} s")
        return json.loads(line)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            process.communicate()


def serve(package: str) -> None:
    """Answers questions on the standard input, in the process."""
    die_with_parent()
    adopt_orphans()
    confine(LIMITS)
    # What a verifier prints is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    importlib.import_module(package)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_reply(*json.loads(line))), file=answers, flush=True)


def _reply(number: str, name: str, answer: str, entry: str) -> tuple[str, float, str]:
    """Returns the question's number, the answer's score, and what is wrong with the task's name."""
    try:
        verifier = _verifier(name)
    except ValueError as error:
        return number, 0.0, str(error)
    return number, judge(verifier, answer, json.loads(entry))[0], ""


def judge(verifier: Verifier, answer: str | None, entry: dict[str, Any]) -> tuple[float, str]:
    """Returns (score, error): the verifier's score; 0 and what was wrong, where it raises or gives no finite number."""
    try:
        return check_reward(verifier(answer, entry), "the verifier"), ""
    # Many verifiers evaluate, convert or parse what the policy wrote; a deadline (BaseException) goes on.
    except Exception as error:
        return 0.0, f"{type(error).__name__}: {error}"[:200]


@functools.cache
def _verifier(name: str) -> Any:
    if name == "math":
        return equal_in_math
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def equal_in_math(answer: str | None, entry: dict[str, Any]) -> float:
    """Returns 1.0 where the last formula of an answer, a boxed one first, equals the entry's in value."""
    from math_verify import parse, verify

    # Their own deadlines need the main thread's signals; the process has one.
    truth = parse(f"\\boxed{{{entry['answer']}}}", parsing_timeout=None)
    return float(verify(truth, parse(answer or "", parsing_timeout=None), timeout_seconds=None))
