"""A verifier's score is a finite number, and what ends a thread is no answer of its."""

import pytest

from custom.env_calls import Abandoned
from custom.verifier_process import judge


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "1.0", [1.0, 2.0]])
def test_a_score_that_is_no_finite_number_is_none(score):
    value, error = judge(lambda answer, entry: score, "4", {})
    assert value == 0.0 and "allowed: a finite number" in error


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, Abandoned])
def test_what_ends_a_thread_or_a_process_is_no_wrong_answer(ending):
    def verifier(answer, entry):
        raise ending

    with pytest.raises(ending):
        judge(verifier, "4", {})
