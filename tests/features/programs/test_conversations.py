"""Rows of programs: whatever they send, what is trained on was sampled behind what stands there."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.features.programs.hostile import MOVES, check, play
from tests.unit.test_turn_tokens import TEMPLATES, THINK_IN_PROMPT, of_template, turn_tokens

MANY = st.lists(
    st.tuples(st.sampled_from(MOVES), st.integers(min_value=0, max_value=20)),
    min_size=1,
    max_size=14,
)
TEMPLATE = st.sampled_from([*TEMPLATES, "think_in_prompt"])
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


def tokens_of(name: str):
    if name == "think_in_prompt":
        return of_template(THINK_IN_PROMPT)
    return turn_tokens(name)


def play_and_check(name, moves, seed, lockstep) -> None:
    check(*play(moves, tokens_of(name), seed, lockstep))


@pytest.mark.seconds
@settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
@given(TEMPLATE, MANY, st.integers(min_value=0, max_value=10**6), st.booleans())
def test_a_sampled_token_is_trained_on_once_behind_the_ids_that_the_engine_was_given(
    name, moves, seed, lockstep
) -> None:
    play_and_check(name, moves, seed, lockstep)


def test_an_answer_that_was_cut_is_not_found_in_the_end_of_an_empty_one() -> None:
    """It reads `<`, and `</s>` is what the template has behind the other."""
    moves = [("begin", 0)] * 4 + [("go_on", 2)]
    play_and_check("llama2", moves, 14110, False)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=QUIET)
@given(TEMPLATE, MANY, st.integers(min_value=0, max_value=10**6), st.booleans())
def test_so_it_is_in_ten_thousand_hostile_conversations(name, moves, seed, lockstep) -> None:
    play_and_check(name, moves, seed, lockstep)
