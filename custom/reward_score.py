"""Scoring rules by data source: what `compute_score` is where the config names no function.

For a data source of your own set `custom_reward_function.path`, or add a rule here: a function, and
a branch in `default_compute_score`. Invariant: a rule reads text and returns a number; it never
sees tokens. Packages' verifiers judge in a process of their own (custom/verifier_process.py), as
some of them execute what the policy wrote.
"""

import json
import re
import unicodedata
from decimal import Decimal
from typing import Any, Literal

from custom.math_answers import TAGGED_ANSWER, answer_line, boxes

# The sign belongs to the number unless a digit stands before it: in "5-3" the last number is 3. A
# comma belongs to it where groups of digits follow, so that "3,4" are two.
NUMBER = re.compile(
    r"(?<!\d)[-−]?(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+|(?<![\w.])(?=\.\d))(?:\.\d+)?"
)
# What may stand between "####" and its number: "#### **$72**", "#### \boxed{72}", "#### x = 72".
BEFORE_NUMBER = re.compile(
    r"(?:[\s$€£*`_:=≈~{(]|\\\$|\\boxed|\\text|\\\(|\\\[|\b[a-zA-Z]\s*(?==)|\+(?=\d))*"
)

# A response in the form that geometry3k asks for.
THINK_THEN_BOX = re.compile(r"<think>.*</think>.*\\boxed\{.*\}", flags=re.DOTALL)

GSM8K = "openai/gsm8k"
GEOMETRY = "hiyouga/geometry3k"
DAPO_SOURCES = ("math_dapo", "math", "math_dapo_reasoning")
MATH_SOURCES = (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "numina_aops_forum",
    "numina_synthetic_math",
    "numina_amc_aime",
    "numina_synthetic_amc",
    "numina_cn_k12",
    "numina_olympiads",
)
# Beginnings of data sources' names.
AIME = "aime"
SEARCH = "searchR1_"
REASONING_GYM = "reasoning_gym/"


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
) -> float | dict[str, Any]:
    """Scores one response, by its data source.

    - openai/gsm8k: 1.0 if the number after the last "####" equals the truth, else 0.0;
        method="flexible" (from YAML: `reward_model.reward_kwargs.method`) takes the response's last
        number instead.
    - MATH and numina's sources: 1.0 if the last box, else the last `<answer>…</answer>`, else the
        last formula equals the truth in value, by math-verify, or as words
        (custom/math_answers.py), else 0.0.
    - math_dapo, math, aime…: 1.0, or -1.0, for what follows the last "Answer:" of the last 300
        characters, with "acc" and "pred"; it is compared as MATH's.
    - hiyouga/geometry3k: as MATH, weighted 0.9, and 0.1 for `<think>…</think>` before a boxed
        answer.
    - searchR1_…: 1.0 if `<answer>…</answer>` is one of the truth's "target", but for case, articles
        and punctuation.
    - reasoning_gym/NAME: the task's own verifier on `extract_answer`; extra_info["entry"] is the
        task's entry as JSON.
    """
    if data_source == GSM8K:
        return score_gsm8k(solution_str, ground_truth, method)
    if data_source in DAPO_SOURCES or data_source.startswith(AIME):
        return score_dapo(solution_str, ground_truth)
    if data_source in MATH_SOURCES:
        return score_math(solution_str, ground_truth)
    if data_source == GEOMETRY:
        return score_geometry(solution_str, ground_truth)
    if data_source.startswith(SEARCH):
        return score_search(solution_str, ground_truth)
    if data_source.startswith(REASONING_GYM):
        task = data_source.removeprefix(REASONING_GYM)
        return score_reasoning_gym(task, solution_str, extra_info or {})
    allowed = [
        GSM8K,
        *DAPO_SOURCES,
        f"{AIME}…",
        *MATH_SOURCES,
        GEOMETRY,
        f"{SEARCH}…",
        f"{REASONING_GYM}NAME",
    ]
    raise ValueError(
        f"no scoring rule for data_source={data_source!r}: set custom_reward_function.path to a "
        f"file with your compute_score, or use one of {', '.join(allowed)}"
    )


def last_number(text: str) -> str | None:
    """Returns the last number as written, without thousands separators.

    "it costs $1,200.50." -> "1200.50"
    """
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    return _as_decimal(numbers[-1])


def number_after_marker(text: str) -> str | None:
    """Returns the number right after the last "####", without thousands separators.

    A marker that nothing follows ends the response, and the one before it counts.
    """
    marked = text.split("####")[1:]
    while marked and not marked[-1].strip(" *\n"):
        marked.pop()
    if not marked:
        return None
    tail = marked[-1]
    before = BEFORE_NUMBER.match(tail)
    start = before.end() if before else 0
    number = NUMBER.match(tail, start)
    return None if number is None else _as_decimal(number.group())


def _as_decimal(number: str) -> str:
    """Returns a number as Python reads it: "−1,200.50" -> "-1200.50"."""
    return number.replace(",", "").replace("−", "-")


def score_gsm8k(
    solution_str: str, ground_truth: str, method: Literal["strict", "flexible"] = "strict"
) -> float:
    """Scores 1.0 or 0.0; numbers are compared as numbers, so that 7.0 is 7."""
    if method not in ("strict", "flexible"):
        raise ValueError(
            f"method={method!r} is unknown; allowed: strict (number after '####'), "
            "flexible (last number)"
        )
    truth = _as_decimal(str(ground_truth).strip())
    if not NUMBER.fullmatch(truth):
        raise ValueError(f"openai/gsm8k: ground_truth={ground_truth!r} must be a number")
    if method == "strict":
        answer = number_after_marker(solution_str)
    else:
        answer = last_number(solution_str)
    if answer is None:
        return 0.0
    return float(Decimal(answer) == Decimal(truth))


def score_math(solution_str: str, ground_truth: Any) -> float:
    """Scores 1.0 or 0.0 by math-verify, which knows fractions, sets, intervals, units …"""
    entry = json.dumps({"answer": str(ground_truth)})
    return score_by_verifier("math_verify", "math", solution_str, entry)


def score_geometry(solution_str: str, ground_truth: Any) -> float:
    """Scores as MATH, weighted 0.9, and 0.1 for the form of the response."""
    has_form = THINK_THEN_BOX.search(solution_str) is not None
    return 0.9 * score_math(solution_str, ground_truth) + 0.1 * float(has_form)


def score_dapo(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Scores as DAPO (arXiv:2503.14476) does: 1.0 or -1.0."""
    answer = answer_line(solution_str[-300:])
    if answer is None:
        return {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    entry = json.dumps({"answer": str(ground_truth)})
    is_right = score_by_verifier("math_verify", "math_line", answer, entry) == 1.0
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def score_search(solution_str: str, ground_truth: Any) -> float:
    """Scores 1.0 where the last tagged answer is the target, or one of several.

    The target is `ground_truth["target"]`; a ground truth that is no dict is the target itself.
    """
    target = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    # A column of Arrow's may be an array.
    truths = [target] if isinstance(target, str | int | float) else list(target)
    tagged = TAGGED_ANSWER.findall(solution_str)
    if not tagged:
        return 0.0
    answer = _plain_words(tagged[-1])
    return float(any(answer & _plain_words(truth) for truth in truths))


def _plain_words(text: Any) -> set[str]:
    """Returns a text in lower case, without accents' variants, articles and punctuation.

    Both ways to take punctuation out count, with a space in its place and without:
    "Spider-Man" -> {"spider man", "spiderman"}, "U.S." -> {"u s", "us"}, "1,000" -> {"1000"}.
    """
    folded = unicodedata.normalize("NFKC", str(text)).casefold()
    folded = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", folded)
    # The point of 3.5 is no punctuation.
    marks = r"(?<!\d)\.|\.(?!\d)|[^\w\s.]|_"
    forms = [re.sub(marks, " ", folded), re.sub(marks, "", folded)]
    without_articles = [re.sub(r"(?<![.\w])(?:a|an|the)(?![.\w])", " ", form) for form in forms]
    words = {" ".join(form.split()) for form in without_articles} - {""}
    # An answer may be "A" of several choices, or a sign.
    return words or {folded.strip()}


def extract_answer(solution_str: str, truth: str) -> str | None:
    """Returns the part of a response that a verifier judges.

    What follows the last `</think>`; of that the last `<answer>…</answer>`, if there is any; of
    that the last box; and of that, where the truth is a number, the last number, because small chat
    models answer in sentences: "4 + 3 = 7." -> "7".
    """
    text = solution_str.rpartition("</think>")[2]
    tagged = TAGGED_ANSWER.findall(text)
    if tagged:
        text = tagged[-1]
    boxed = boxes(text)
    if boxed:
        text = boxed[-1].content
    text = text.strip()
    if NUMBER.fullmatch(truth.strip()):
        return last_number(text)
    return text


def score_reasoning_gym(name: str, solution_str: str, extra_info: dict[str, Any]) -> float:
    """Scores by the verifier of task `name`, which may give part of a point.

    "12" for "2" gives 0.5. An answer that the verifier trips over scores 0.
    """
    if "entry" not in extra_info:
        raise ValueError(
            f"{REASONING_GYM}{name}: extra_info has no 'entry', which is json.dumps(dataset[i])"
        )
    entry = json.loads(extra_info["entry"])
    if name == "composite":
        name = entry["metadata"]["source_dataset"]
    answer = extract_answer(solution_str, str(entry["answer"])) or ""
    return score_by_verifier("reasoning_gym", name, answer, extra_info["entry"])


def score_by_verifier(package: str, task: str, answer: str, entry: str) -> float:
    """Scores by a package's verifier, in its process; `entry` is the task's entry as JSON."""
    from custom.verifier_process import verifier_process

    return verifier_process(package).score(task, answer, entry)
