r"""Tables of how right and wrong answers are written, and which of several counts.

A form is a truth, an answer and whether they are the same; each is tried in a box, and on a line
that begins with "Answer:".
"""

import time

import numpy as np
import pytest

from custom.math_answers import boxes, marked_answer, plain_form
from custom.reward_score import (
    answer_line,
    default_compute_score,
    extract_answer,
    score_gsm8k,
    score_search,
)
from custom.verifier_process import equal_as_line, equal_in_math

MARKS = [
    ("34", r"\text{34}", True),
    ("5", "$5$", True),
    ("5", r"\(5\)", True),
    ("5", "5.", True),
    ("5", "$5$.", True),
    ("5", r"\mathbf{5}", True),
    ("5", r"\displaystyle 5", True),
    ("5", "**5**", True),
    ("5", "(5)", True),
    ("5", "{5}", True),
    ("5", "", False),
    ("12", "1 2", False),
    ("0", r"\emptyset", False),
]
NUMBERS = [
    ("0.5", r"\frac{1}{2}", True),
    (r"\frac{1}{2}", "1/2", True),
    (r"\frac{1}{2}", r"\dfrac{1}{2}", True),
    (r"\frac{1}{2}", r"\tfrac12", True),
    (r"-\frac{1}{2}", r"\frac{-1}{2}", True),
    ("0.333", r"\frac13", False),
    ("3.5", "35", False),
    ("1000", "1,000", True),
    ("1000", "1{,}000", True),
    ("1000", r"1\,000", True),
    ("1000", "1 000", True),
    (r"1,\!000", "1000", True),
    ("1234", "1,2,3,4", False),
    ("-4", "−4", True),
    ("-4", "- 4", True),
    ("4", "+4", True),
    (".5", "0.5", True),
    ("1.5e3", "1500", True),
    (r"3\frac{1}{2}", "7/2", True),
    (r"\sqrt{2}", r"\sqrt2", True),
    ("√2", r"\sqrt{2}", True),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"\sqrt{2}", "1.414", False),
    (r"2\pi", "2π", True),
    (r"\infty", "∞", True),
    (r"\pm 2", "-2, 2", True),
    ("10_2", "1010_2", False),
]
UNITS = [
    ("50", "50%", True),
    (r"50\%", "0.5", True),
    ("90", r"90^\circ", True),
    ("90", "90°", True),
    ("5", r"5\text{ cm}", True),
    ("5", r"5\,\mathrm{cm}", True),
    ("5", "5 apples", True),
    ("5", "6 apples", False),
    ("5", r"\$5.00", True),
    ("$5", "5", True),
]
WORDS = [
    (r"\text{Evelyn}", "Evelyn", True),
    ("Evelyn", r"\textbf{Evelyn}", True),
    ("Evelyn", "evelyn", True),
    ("Evelyn", "Briana", False),
    ("yes", "Yes", True),
    (r"\text{No}", r"\text{Yes}", False),
    (r"\text{(C)}", "C", True),
    ("C", "(C)", True),
    ("C", r"\textbf{(C)}", True),
    (r"\text{(C)}", r"\text{(D)}", False),
]
SEVERAL = [
    ("(1,2)", "(1, 2)", True),
    ("(1,2)", r"\left(1, 2\right)", True),
    ("(1,2)", "(2,1)", False),
    ("[1,2)", "[1, 2)", True),
    ("[1,2)", "[1, 2]", False),
    ("1,2", "2,1", True),
    ("1,2", r"1 \text{ and } 2", True),
    ("1,2", r"\{1,2\}", True),
    ("1,2", "x=1 or x=2", True),
    ("1,2", "1", False),
    ("1", "1,2", False),
    ("1,2", "12", False),
    ("2:3", "2 : 3", True),
    ("2:3", "3:2", False),
    (r"(-\infty,2]\cup[3,\infty)", r"(-\infty, 2] \cup [3, \infty)", True),
]
FORMULAS = [
    ("5", "x = 5", True),
    ("5", "x=6", False),
    ("y=2x+3", "y = 3 + 2x", True),
    ("2x+3", "y=2x+3", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x-1)^2", False),
    ("3x", r"3\cdot x", True),
    ("1+2i", "2i+1", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}", False),
]
FORMS = MARKS + NUMBERS + UNITS + WORDS + SEVERAL + FORMULAS


@pytest.mark.parametrize(("truth", "answer", "is_right"), FORMS)
def test_a_form_in_a_box_and_on_a_line_is_compared_by_value(truth, answer, is_right) -> None:
    pytest.importorskip("math_verify")
    entry = {"answer": truth}
    assert equal_in_math(f"so it is \\boxed{{{answer}}}", entry) == float(is_right)
    assert equal_in_math(f"so it is $\\boxed{{{answer}}}$.", entry) == float(is_right)
    assert equal_as_line(answer, entry) == float(is_right)


FIRST_AND_LAST = r"First \boxed{5}. Hence x = 6, so the answer is \boxed{6}."


@pytest.mark.parametrize(
    ("response", "right", "wrong"),
    [
        (FIRST_AND_LAST, "6", ["5", "5,6"]),
        (r"\boxed{5}, no: \boxed{6}", "6", ["5", "5,6"]),
        (r"\boxed{5}, or rather \boxed{6}", "6", ["5"]),
        (r"\boxed{5} \boxed{6}", "6", ["5"]),
        (r"$x=\boxed{5}$ and so on. Thus $\boxed{6}$", "6", ["5"]),
        (r"\boxed{1} and \boxed{2}", "1,2", ["1", "2"]),
        (r"$\boxed{1}$, $\boxed{2}$, and $\boxed{3}$.", "1,2,3", ["3", "2,3"]),
        (r"$x_1 = \boxed{1}$ and $x_2 = \boxed{2}$", "1,2", ["2"]),
        (r"\boxed{5}, \boxed{5}", "5", ["5,6"]),
        (r"\boxed{6} because 2 + 3 = 5", "6", ["5"]),
        (r"\boxed{\text{first } \boxed{5}}", "5", ["6"]),
        (r"<think>\boxed{5}</think> \boxed{6}", "6", ["5"]),
        (r"\boxed{5} and \boxed{6", "5", ["6"]),
        (r"\fbox{6}", "6", ["5"]),
        (r"\boxed 6.", "6", ["5"]),
        (r"$\boxed {6}$", "6", ["5"]),
        ("5, then <answer>6</answer>", "6", ["5"]),
        ("the answer is 5. Wait: the answer is 6.", "6", ["5"]),
        ("the final answer is $5$. No, the final answer is $6$.", "6", ["5"]),
        ("$a=4$ and then $x = 3$", "3", ["4"]),
    ],
)
def test_the_last_answer_counts_and_joined_boxes_are_one(response, right, wrong) -> None:
    pytest.importorskip("math_verify")
    assert equal_in_math(response, {"answer": right}) == 1.0
    for truth in wrong:
        assert equal_in_math(response, {"answer": truth}) == 0.0


@pytest.mark.parametrize(
    ("response", "is_right"),
    [
        (r"Answer: \boxed{34}", True),
        ("**Answer:** 34", True),
        ("**Answer**: 34", True),
        ("Answer:\n\n$$34$$", True),
        ("Answer:\\[\n34\n\\]", True),
        ("### Answer: \\(34\\)", True),
        ("Answer：34", True),
        ("Answer: `34`", True),
        ("Answer: 034", True),
        ("Answer: 34<|im_end|>", True),
        ("Answer: 34 (since 30 + 4)", True),
        ("Answer: 34, because 30 + 4 is 34", True),
        ("Answer: it is 34", True),
        ("Answer: 33\nAnswer: 34", True),
        ("Answer: 34\nAnswer: 33", False),
        ("Answer: 33 or 34", False),
        ("Answer: 34, no 33", False),
        ("Answer: not 34", False),
        ("Answer: 34 and 20", False),
        ("Answer: ", False),
        ("answer is 34", False),
    ],
)
def test_dapos_line_may_be_marked_or_give_its_reason_but_names_one(response, is_right) -> None:
    pytest.importorskip("math_verify")
    line = answer_line(response)
    assert equal_as_line(line, {"answer": "34"}) == float(is_right)


@pytest.mark.seconds
def test_both_rules_read_the_table_through_their_process() -> None:
    pytest.importorskip("math_verify")
    assert default_compute_score("lighteval/MATH", FIRST_AND_LAST, "6") == 1.0
    for text, truth in ((r"Answer: \text{34}", "34"), ("Answer: (1, 2)", "(1,2)")):
        assert default_compute_score("math_dapo", text, truth)["score"] == 1.0
    assert default_compute_score("math_dapo", "Answer: (2, 1)", "(1,2)")["score"] == -1.0


@pytest.mark.parametrize(
    ("text", "truth", "is_right"),
    [
        ("#### **72**", "72", True),
        ("**#### 72**", "72", True),
        (r"#### $\boxed{72}$", "72", True),
        (r"#### \$72", "72", True),
        ("#### €72", "72", True),
        ("#### x = 72", "72", True),
        ("#### (72)", "72", True),
        ("#### 72 ####", "72", True),
        ("#### 72\n####", "72", True),
        ("#### −4", "-4", True),
        ("#### +4", "4", True),
        ("#### .5", "0.5", True),
        ("#### 1,234,567", "1234567", True),
        ("#### 12,00,000", "1200000", True),
        ("#### 72 apples", "72", True),
        ("#### about 72", "72", False),
        ("#### 7 #### none", "7", False),
        ("#### 1,5", "15", False),
    ],
)
def test_gsm8ks_number_may_be_marked(text, truth, is_right) -> None:
    assert score_gsm8k(text, truth) == float(is_right)


@pytest.mark.parametrize(
    ("text", "last"),
    [("3,4", "4"), ("(1,2)", "2"), ("it is −4.", "-4"), ("Fig.5", "5"), ("1,200", "1200")],
)
def test_a_comma_between_numbers_does_not_make_one_of_them(text, last) -> None:
    assert extract_answer(text, "1") == last


@pytest.mark.parametrize(
    ("response", "truth", "answer"),
    [
        (r"\boxed{7} since 3 + 4", "7", "7"),
        (r"<answer>\boxed{7}</answer> of 4", "7", "7"),
        (r"The colour is \boxed{blue}.", "blue", "blue"),
        (r"<think>\boxed{3}</think> it is 4", "4", "4"),
    ],
)
def test_a_box_is_what_a_tasks_verifier_judges(response, truth, answer) -> None:
    assert extract_answer(response, truth) == answer


@pytest.mark.parametrize(
    ("answer", "target", "is_right"),
    [
        ("U.S.", "US", True),
        ("the U.S.A.", ["USA"], True),
        ("Spider-Man", "Spiderman", True),
        ("Spider-Man", "spider man", True),
        ("Beyonce\u0301", "Beyonc\u00e9", True),
        ("1,000", "1000", True),
        ("3.5", "35", False),
        ("12", "1 2", False),
        ("A", "B", False),
        ("A", "a", True),
        ("!", "?", False),
        ("x", np.array(["y", "x"], dtype=object), True),
        ("5", 5, True),
        ("no", "yes", False),
    ],
)
def test_searchs_words_are_compared_with_either_way_to_write_them(answer, target, is_right) -> None:
    assert score_search(f"<answer>{answer}</answer>", {"target": target}) == float(is_right)


def test_boxes_are_found_by_their_braces() -> None:
    text = r"\boxed{\{1, 2\}} \boxed{\frac{1}{2}} \boxed{a \boxed{b}} \boxed{open"
    assert [box.content for box in boxes(text)] == [
        r"\{1, 2\}",
        r"\frac{1}{2}",
        r"a \boxed{b}",
        "b",
    ]
    assert marked_answer("no mark at all") is None


def test_many_boxes_that_never_close_cost_linear_time() -> None:
    start = time.process_time()
    assert boxes("\\boxed{" * 50_000) == []
    assert plain_form(". " * 5_000) is not None
    assert time.process_time() - start < 3
