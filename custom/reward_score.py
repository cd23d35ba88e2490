"""Scoring rules by data source: what `compute_score` is where the config names no function of the user's.

Invariant: a rule reads text and returns a number; it never sees tokens. For a data source of your own set
`custom_reward_function.path`, or add a rule here.
"""

import importlib.util
import json
import re
from decimal import Decimal
from functools import cache
from typing import Any, Literal

from custom.verifier import VerifierProcess

# The sign belongs to the number unless a digit stands before it: in "5-3" the last number is 3.
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")
REASONING_GYM = "reasoning_gym/"


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float:
    """Scores one response, by its data source.

    openai/gsm8k: 1.0 if the number after the last "####" equals the truth, else 0.0; method="flexible" (from YAML:
    `reward_model.reward_kwargs.method`) takes the response's last number instead.
    reasoning_gym/NAME: the task's own verifier on `extract_answer`; extra_info["entry"] is the task's entry as JSON.
    """
    if data_source == "openai/gsm8k":
        return score_gsm8k(solution_str, ground_truth, method)
    if data_source.startswith(REASONING_GYM):
        return score_reasoning_gym(data_source.removeprefix(REASONING_GYM), solution_str, extra_info or {})
    raise ValueError(
        f"no scoring rule for data_source={data_source!r}; allowed: openai/gsm8k, {REASONING_GYM}NAME. "
        "Set custom_reward_function.path to a file with your compute_score"
    )


def last_number(text: str) -> str | None:
    """Returns the last number as written, without thousands separators: "it costs $1,200.50." -> "1200.50"."""
    numbers = NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def score_gsm8k(solution_str: str, ground_truth: str, method: Literal["strict", "flexible"] = "strict") -> float:
    """Scores 1.0 or 0.0; numbers are compared as numbers, so that 7.0 is 7."""
    if method not in ("strict", "flexible"):
        raise ValueError(
            f"method={method!r} is unknown; allowed: strict (the number after '####'), flexible (the last number)"
        )
    if method == "strict":
        _, marker, tail = solution_str.rpartition("####")
        match = NUMBER.match(tail.lstrip(" $")) if marker else None
        answer = match.group().replace(",", "") if match else None
    else:
        answer = last_number(solution_str)
    return float(answer is not None and Decimal(answer) == Decimal(ground_truth.replace(",", "")))


@cache
def _verifiers() -> VerifierProcess:
    """Is this process's one, which starts when it is asked."""
    return VerifierProcess()


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

    The verifier runs in a process of its own (custom/verifier.py); an answer that it trips over scores 0.
    """
    if "entry" not in extra_info:
        raise ValueError(
            f"{REASONING_GYM}{name}: extra_info has no 'entry', the task's entry as JSON (json.dumps(dataset[i]))"
        )
    entry = json.loads(extra_info["entry"])
    if name == "composite":
        name = entry["metadata"]["source_dataset"]
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError(f"data_source {REASONING_GYM}{name} needs the package: pip install reasoning-gym")
    answer = extract_answer(solution_str, str(entry["answer"])) or ""
    return _verifiers().score(name, answer, extra_info["entry"])
