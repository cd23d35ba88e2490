"""Scoring rules by data source: what `compute_score` is where the config names no function of the user's.

For a data source of your own set `custom_reward_function.path`, or add a rule here. Packages' verifiers judge in a
process of their own: some of them execute what the policy wrote. Invariant: a rule reads text and returns a number; it
never sees tokens. An answer that a verifier trips over, or takes too long for, scores 0; whatever it does, the trainer
goes on: it reads what the process sends as data, up to a deadline, and ends the process where that is not one answer.
"""

import importlib.util
import json
import logging
import os
import pickle
import re
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, Literal, TypeAlias

from custom.confine import Limits, adopt_orphans, confine, die_with_parent, kill_tree
from custom.env import check_reward
from data.loading import load_extern_object
from data.texts import say

# The sign belongs to the number unless a digit stands before it: in "5-3" the last number is 3.
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")
REASONING_GYM = "reasoning_gym/"
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
MATH = ["lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"]
MATH += [f"numina_{name}" for name in NUMINA]
SOURCES = (
    "openai/gsm8k",
    *DAPO,
    "aime…",
    *MATH,
    "hiyouga/geometry3k",
    "searchR1_…",
    f"{REASONING_GYM}NAME",
)


def score_from_file(path: str, name: str, row: dict[str, Any]) -> tuple[str, Any]:
    """Calls the function `name` of a file on a row, in a process of reward_manager=prime.

    Returns: ("", result), or what it raised, as text, and None: exceptions and results of any kind may not travel.
    """
    try:
        result = load_extern_object(path, name)(**row)
        pickle.dumps(result)
    except BaseException as error:
        return f"{error!r}\n{traceback.format_exc(limit=-3)}", None
    return "", result


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float | dict[str, Any]:
    """Scores one response, by its data source.

    openai/gsm8k: 1.0 if the number after the last "####" equals the truth, else 0.0; method="flexible" (from YAML:
    `reward_model.reward_kwargs.method`) takes the response's last number instead.
    MATH and numina's sources: 1.0 if the boxed or last formula equals the truth in value, by math-verify, else 0.0.
    math_dapo, math, aime…: 1.0, or -1.0, for what follows the last "Answer:" of the last 300 characters, with "acc" and
    "pred". hiyouga/geometry3k: as MATH, weighted 0.9, and 0.1 for <think>…</think> before a boxed answer.
    searchR1_…: 1.0 if <answer>…</answer> is one of the truth's "target", but for case, articles and punctuation.
    reasoning_gym/NAME: the task's own verifier on `extract_answer`; extra_info["entry"] is the task's entry as JSON.
    """
    if data_source == "openai/gsm8k":
        return score_gsm8k(solution_str, ground_truth, method)
    if data_source in DAPO or data_source.startswith("aime"):
        return score_dapo(solution_str, ground_truth)
    if data_source in MATH:
        return score_math(solution_str, ground_truth)
    if data_source == "hiyouga/geometry3k":
        form = re.search(r"<think>.*</think>.*\\boxed\{.*\}", solution_str, flags=re.DOTALL)
        return 0.9 * score_math(solution_str, ground_truth) + 0.1 * (form is not None)
    if data_source.startswith("searchR1_"):
        return score_search(solution_str, ground_truth)
    if data_source.startswith(REASONING_GYM):
        return score_reasoning_gym(
            data_source.removeprefix(REASONING_GYM), solution_str, extra_info or {}
        )
    raise ValueError(say("no_rule", source=data_source, allowed=", ".join(SOURCES)))


def last_number(text: str) -> str | None:
    """Returns the last number as written, without thousands separators: "it costs $1,200.50." -> "1200.50"."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def score_gsm8k(
    solution_str: str, ground_truth: str, method: Literal["strict", "flexible"] = "strict"
) -> float:
    """Scores 1.0 or 0.0; numbers are compared as numbers, so that 7.0 is 7."""
    if method not in ("strict", "flexible"):
        raise ValueError(
            f"method={method!r} is unknown; allowed: strict (number after '####'), flexible (last number)"
        )
    if method == "strict":
        _, marker, tail = solution_str.rpartition("####")
        match = NUMBER.match(tail.lstrip(" $")) if marker else None
        answer = match.group().replace(",", "") if match else None
    else:
        answer = last_number(solution_str)
    truth = str(ground_truth).strip().replace(",", "")
    if not NUMBER.fullmatch(truth):
        raise ValueError(f"openai/gsm8k: ground_truth={ground_truth!r} must be a number")
    return float(answer is not None and Decimal(answer) == Decimal(truth))


def score_math(solution_str: str, ground_truth: Any) -> float:
    """Scores 1.0 or 0.0 by math-verify, which knows fractions, sets, intervals, units …"""
    return _verifiers("math_verify").score(
        "math", solution_str, json.dumps({"answer": str(ground_truth)})
    )


def score_dapo(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Scores as DAPO (arXiv:2503.14476) does: 1.0 or -1.0."""
    answers = re.findall(r"answer\s*:\s*(.+)", solution_str[-300:], flags=re.IGNORECASE)
    right = bool(answers) and score_math(answers[-1], ground_truth) == 1.0
    return {
        "score": 1.0 if right else -1.0,
        "acc": right,
        "pred": answers[-1] if answers else "[INVALID]",
    }


def score_search(solution_str: str, ground_truth: Any) -> float:
    """Scores 1.0 where the last tagged answer is one of `ground_truth["target"]`, a text or several."""

    def plain(text: Any) -> list[str]:
        return re.sub(r"\b(a|an|the)\b|[^\w\s]|_", " ", str(text).lower()).split()

    tagged = re.findall(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    target = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    truths = list(target) if isinstance(target, list | tuple) else [target]
    return float(bool(tagged) and plain(tagged[-1]) in map(plain, truths))


def extract_answer(solution_str: str, truth: str) -> str | None:
    """Returns the part of a response that a verifier judges.

    What follows the last </think>; of that the last <answer>…</answer>, if there is any; and of that, where the truth
    is a number, the last number, because small chat models answer in sentences: "4 + 3 = 7." -> "7".
    """
    text = solution_str.rpartition("</think>")[2]
    tagged = re.findall(r"<answer>(.*?)</answer>", text, flags=re.DOTALL)
    text = (tagged[-1] if tagged else text).strip()
    return last_number(text) if NUMBER.fullmatch(truth.strip()) else text


def score_reasoning_gym(name: str, solution_str: str, extra_info: dict[str, Any]) -> float:
    """Scores by the verifier of task `name`, which may give part of a point ("12" for "2" gives 0.5).

    The verifier runs in a process of its own (custom/reward_score.py); an answer that it trips over scores 0.
    """
    if "entry" not in extra_info:
        raise ValueError(
            f"{REASONING_GYM}{name}: extra_info has no 'entry', which is json.dumps(dataset[i])"
        )
    entry = json.loads(extra_info["entry"])
    if name == "composite":
        name = entry["metadata"]["source_dataset"]
    answer = extract_answer(solution_str, str(entry["answer"])) or ""
    return _verifiers("reasoning_gym").score(name, answer, extra_info["entry"])


# Judges an answer (None: there is none) to a task's entry.
Verifier: TypeAlias = Callable[[str | None, dict[str, Any]], Any]

logger = logging.getLogger(__name__)
# For an answer, and for the process to be ready for the first.
DEADLINE_S, START_S = 10.0, 120.0
LONGEST_REPLY = 10_000
LIMITS = Limits(network=False, memory_gb=4.0)
START = "import sys; sys.path.insert(0, sys.argv[1]); from custom.reward_score import serve; serve(sys.argv[2])"


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
                self._process.stdin.write(
                    json.dumps([number, name, answer, entry]).encode() + b"\n"
                )
                answered, score, refused = self._read(DEADLINE_S)
                if answered != number:
                    raise ValueError("it sent another answer's reply")
                score = check_reward(score, "the verifier")
            except (OSError, ValueError, TypeError) as error:
                self._end()
                logger.warning(
                    "%s: an answer scores 0, as the verifier did not survive it: %s", name, error
                )
                return 0.0
        if refused:
            raise ValueError(str(refused))
        return score

    def _ready(self) -> None:
        """Starts the process where there is none, and waits until it is ready for an answer."""
        if self._process is None or self._process.poll() is not None:
            self._end()
            command = [
                sys.executable,
                "-c",
                START,
                str(Path(__file__).resolve().parents[1]),
                self.package,
            ]
            self._process = Popen(
                command, stdin=PIPE, stdout=PIPE, start_new_session=True, bufsize=0
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

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            kill_tree(process.pid)
            process.communicate()


@cache
def _verifiers(package: str) -> VerifierProcess:
    """Is this process's one, which starts when it is asked."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(
            f"this data_source's rule needs a package: pip install {package.replace('_', '-')}"
        )
    return VerifierProcess(package)


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


@cache
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
