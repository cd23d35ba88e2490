"""What a turn costs beside sampling, as a ratio to a bare loop that runs in turns with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.benchmarks.turn_loop_cost import MOST, cost_of_turn
from workers.rollout.engine import Completion, Sampling, VersionSpan, copy_with


@pytest.mark.seconds
@pytest.mark.parametrize("isolation", list(MOST))
def test_a_turn_costs_no_more_than_so_many_turns_of_a_bare_loop(isolation: str) -> None:
    cost = cost_of_turn(isolation, episodes=32, rounds=5)
    assert cost.ratio <= MOST[isolation], cost


def test_a_copied_record_is_what_dataclasses_make_of_it() -> None:
    sampling = Sampling(max_tokens=5, top_k=3, stop_token_ids=(1, 2))
    completion = Completion(request_id="7", token_ids=[1], log_probs=[-0.5], finish_reason="stop")
    span = VersionSpan(version=3, start=0, end=1)
    assert copy_with(sampling, seed=9) == replace(sampling, seed=9)
    assert copy_with(completion, versions=(span,)) == replace(completion, versions=(span,))
    assert sampling.seed == 0 and completion.versions == ()


def test_a_field_that_a_record_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="Sampling has no sede"):
        copy_with(Sampling(max_tokens=5), sede=1)
