"""Turns that begin to be cut in a run ring; those that were cut from its beginning need not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from features.alarms.monitor import Alarms
from features.alarms.rules.lengths import LengthRules
from tests.features.alarms.made_steps import changed, empty_batch, made_run, seen_step
from training.config import PPOConfig

TURNS = 400


def texts(shares: Sequence[float], rules: LengthRules | None = None) -> list[list[str]]:
    """Returns what is found in steps of a hundred episodes, of whose turns such shares are cut."""
    rules = rules or LengthRules(made_run())
    steps = []
    for share in shares:
        cut = {"agent/episodes": 100.0, "agent/turns/mean": 4.0, "agent/cut_turns": share * TURNS}
        steps.append([finding.text for finding in rules.check(cut)])
    return steps


def test_turns_that_begin_to_be_cut_are_found_however_long_ago_few_were() -> None:
    shares = [0.3, 0.02, *[0.4] * 30, 0.65, 0.76]
    *quiet, first, second = texts(shares)
    assert not any(quiet)
    assert first == ["65% of turns were cut at their limit; in an earlier step 2% were"]
    assert len(second) == 1


@pytest.mark.parametrize(
    "shares",
    [
        [0.68, 0.75, 0.57, 0.62, 0.45, 0.37, 0.23, 0.05, 0.16, 0.07],
        [0.9] * 20,
        [0.0, 0.001, 0.005, 0.0, 0.09, 0.3, 0.5],
        [0.2, 0.6, 0.8],
    ],
    ids=["fall", "were always cut", "half and no more", "were never few"],
)
def test_turns_that_are_cut_less_or_as_they_were_are_not_found(shares: list[float]) -> None:
    assert not any(texts(shares))


def test_nearly_all_turns_are_found_from_the_first_step_on() -> None:
    assert texts([0.96]) == [["96% of turns were cut at their limit"]]
    assert texts([0.0, 0.96])[1] == ["96% of turns were cut at their limit"]


def test_without_turns_answers_are_looked_at_alone() -> None:
    rules = LengthRules(made_run())
    assert [f.text for f in rules.check({"response_length/clip_ratio": 0.8})] == [
        "80% of answers fill data.max_response_length"
    ]
    assert rules.fewest_cut == 1.0


def test_a_resumed_run_remembers_how_few_were_cut() -> None:
    before = Alarms(made_run())
    texts([0.02], lengths_of(before))
    after = Alarms(made_run())
    after.load_state_dict(before.state_dict())
    assert texts([0.7], lengths_of(after))[0]


def lengths_of(alarms: Alarms) -> LengthRules:
    rules = alarms.memories[LengthRules]
    assert isinstance(rules, LengthRules)
    return rules


@pytest.mark.parametrize(("episodes", "found"), [(8, 1), (7, 0)])
def test_few_episodes_are_not_judged(episodes: int, found: int) -> None:
    full = {"response_length/clip_ratio": 0.8}
    step = seen_step(empty_batch(episodes), full)
    assert len(list(LengthRules(made_run()).pinned_lengths(step))) == found


def test_answers_that_may_not_end_are_not_judged() -> None:
    config = changed(PPOConfig(), "actor_rollout_ref.rollout.ignore_eos", True)
    step = seen_step(empty_batch(8), {"response_length/clip_ratio": 0.8}, config=config)
    assert not list(LengthRules(made_run(config)).pinned_lengths(step))
