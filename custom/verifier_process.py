"""The process in which packages' verifiers judge answers, as some of them execute what they judge.

    trainer: VerifierProcess.score  ->  [number, task, answer, entry]          a line of JSON each
    process: serve                  <-  [number, score, what is wrong with the task's name]

Invariant: whatever an answer does to the process, the trainer goes on. It reads what the process
sends as data, up to a deadline, and ends the process where that is not one answer to its question;
such an answer scores 0. The process has no network, bounded memory, and ends with the trainer.
"""

import importlib
import importlib.util
import json
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple, TypeAlias

from custom.confine import Limits, adopt_orphans, confine, die_with_parent, kill_tree
from custom.env_calls import check_reward
from custom.math_answers import marked_answer, names_one, plain_form, same_text, without_reason

logger = logging.getLogger(__name__)

# Seconds for an answer, and for the process to be ready for the first.
DEADLINE_S = 10.0
START_S = 120.0
# After so many replies to other questions the process is given up.
MAX_DROPPED = 100
# Characters of one reply.
LONGEST_REPLY = 10_000
# Characters of what was wrong with an answer.
MAX_ERROR_CHARS = 200
LIMITS = Limits(network=False, memory_gb=4.0)
# `custom` and `data` lie side by side in a clone, and where the package is installed.
ROOT = Path(__file__).resolve().parents[1]
# The program of the process, with ROOT and a package as its arguments, from any working directory.
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from custom.verifier_process import serve
serve(sys.argv[2])
"""

# Judges an answer (None: there is none) to a task's entry.
Verifier: TypeAlias = Callable[[str | None, dict[str, Any]], Any]


class Reply(NamedTuple):
    """Answers one question.

    Attributes:
        number: the question's.
        score: of its answer.
        problem: what is wrong with the task's name; empty where it is known.
    """

    number: str
    score: float
    problem: str


# --- In the trainer ---


class VerifierProcess:
    """Asks the process, which starts with the first answer.

    It starts again after an answer that it did not survive.

    Args:
        package: whose verifiers judge: reasoning_gym, by the task's name; math_verify, whose
            tasks are "math" (a response) and "math_line" (a line that is the answer).
    """

    def __init__(self, package: str = "reasoning_gym") -> None:
        self.package = package
        self._lock = threading.Lock()
        self._process: Any = None

    def score(self, name: str, answer: str, entry: str) -> float:
        """Returns the score of an answer to a task's entry (JSON), 0 to 1.

        Raises:
            ValueError: there is no such task.
        """
        with self._lock:
            try:
                reply = self._ask(name, answer, entry)
            except (OSError, ValueError, TypeError) as error:
                self._end()
                logger.warning(
                    "%s: an answer scores 0, as the verifier did not survive it: %s", name, error
                )
                return 0.0
        if reply.problem:
            raise ValueError(str(reply.problem))
        return reply.score

    def _ask(self, name: str, answer: str, entry: str) -> Reply:
        """Sends a question and reads its reply; raises where what comes is not that."""
        # An answer may have written what looks like a reply, but cannot know this.
        number = secrets.token_hex(8)
        self._start_if_needed()
        question = json.dumps([number, name, answer, entry])
        self._process.stdin.write(question.encode() + b"\n")
        for _ in range(MAX_DROPPED):
            reply = Reply(*self._read(DEADLINE_S))
            if reply.number == number:
                return reply._replace(score=check_reward(reply.score, "the verifier"))
            logger.warning("%s: a reply that nobody asked for is dropped", name)
        raise ValueError(f"it sent {MAX_DROPPED} replies to other questions")

    def _start_if_needed(self) -> None:
        """Starts the process where there is none, and waits until it is ready for an answer."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._process = Popen(
            [sys.executable, "-c", PROGRAM, str(ROOT), self.package],
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            bufsize=0,
        )
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

    def end(self) -> None:
        """Ends the process, whoever waits for its reply; it starts again with the next answer."""
        process = self._process
        # Another process may have the number of one that has ended.
        if process is not None and process.poll() is None:
            kill_tree(process.pid)
            process.wait()

    def _end(self) -> None:
        process = self._process
        self._process = None
        if process is None:
            return
        # Another process may have the number of one that has ended.
        if process.poll() is None:
            kill_tree(process.pid)
        process.communicate()


# The one that this process asks about each package.
_PROCESSES: dict[str, VerifierProcess] = {}


def verifier_process(package: str) -> VerifierProcess:
    """Returns the one that this process asks about a package; it starts with the first answer."""
    if package not in _PROCESSES:
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"this data_source's rule needs a package: pip install {package.replace('_', '-')}"
            )
        _PROCESSES[package] = VerifierProcess(package)
    return _PROCESSES[package]


def end_verifier_processes() -> None:
    """Ends those of this process; each starts again with its next answer."""
    for process in _PROCESSES.values():
        process.end()


# --- In the process ---


def serve(package: str) -> None:
    """Answers questions on the standard input until it ends."""
    die_with_parent()
    adopt_orphans()
    confine(LIMITS)
    # A verifier's output is no reply: it goes to the standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    importlib.import_module(package)
    print(json.dumps("ready"), file=replies, flush=True)
    pid = os.getpid()
    for line in sys.stdin:
        number, name, answer, entry = json.loads(line)
        reply = _reply(number, name, answer, entry)
        # An answer that is executed may fork: its child has nothing to say.
        if os.getpid() != pid:
            os._exit(1)
        print(json.dumps(reply), file=replies, flush=True)


def _reply(number: str, name: str, answer: str, entry: str) -> Reply:
    try:
        verifier = _verifier(name)
    except ValueError as error:
        return Reply(number, 0.0, str(error))
    score, _ = judge(verifier, answer, json.loads(entry))
    return Reply(number, score, "")


def judge(verifier: Verifier, answer: str | None, entry: dict[str, Any]) -> tuple[float, str]:
    """Returns the verifier's score and "".

    Where it raises or gives no finite number these are 0 and what was wrong: many verifiers
    evaluate, convert or parse what the policy wrote.
    """
    try:
        return check_reward(verifier(answer, entry), "the verifier"), ""
    # A deadline, which is a BaseException, goes on.
    except Exception as error:
        return 0.0, f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]


@cache
def _verifier(name: str) -> Verifier:
    """Returns the verifier of a task; ValueError where there is no such task."""
    if name in MATH_VERIFIERS:
        return MATH_VERIFIERS[name]
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def equal_in_math(answer: str | None, entry: dict[str, Any]) -> float:
    """Returns 1.0 where a response's answer equals the entry's in value.

    The answer is what the response marks (`marked_answer`), else its last formula.
    """
    text = answer or ""
    truth = str(entry["answer"])
    marked = marked_answer(text)
    if marked is None:
        return _equal_parsed(text, _as_formula(plain_form(truth)))
    return _equal_answers(marked, truth)


def equal_as_line(answer: str | None, entry: dict[str, Any]) -> float:
    """Returns 1.0 where a line that is the answer equals the entry's in value.

    The line may hold a box, say why it is so, or be a sentence that names one number.
    """
    line = answer or ""
    truth = str(entry["answer"])
    marked = marked_answer(line)
    if marked is not None:
        return _equal_answers(marked, truth)
    found = without_reason(plain_form(line))
    if _equal_answers(found, truth):
        return 1.0
    if not names_one(found):
        return 0.0
    return _equal_parsed(found, _as_formula(plain_form(truth)))


def _equal_answers(answer: str, truth: str) -> float:
    """Compares two answers, as text first: math-verify knows no words, and reads few marks."""
    ours = plain_form(answer)
    theirs = plain_form(truth)
    if same_text(ours, theirs):
        return 1.0
    if _equal_parsed(_as_formula(ours), _as_formula(theirs)):
        return 1.0
    if (ours, theirs) == (answer, truth):
        return 0.0
    # What math-verify makes of the marks itself is not lost.
    return _equal_parsed(_as_formula(answer), _as_formula(truth))


def _as_formula(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _equal_parsed(text: str, truth: str) -> float:
    """Returns 1.0 where the last formula of a text equals the truth's in value."""
    from math_verify import parse, verify

    # Their own deadlines need the main thread's signals; the process has one.
    parsed_truth = parse(truth, parsing_timeout=None)
    parsed_answer = parse(text, parsing_timeout=None)
    return float(verify(parsed_truth, parsed_answer, timeout_seconds=None))


MATH_VERIFIERS: dict[str, Verifier] = {"math": equal_in_math, "math_line": equal_as_line}
