"""Turns that begin to be cut in a run ring; those that were cut from its beginning need not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from features.alarms.length_rules import LengthRules
from features.alarms.monitor import Alarms
from training.config import PPOConfig
from training.observers import ObservedRun

TURNS = 400


def texts(shares: Sequence[float], rules: LengthRules | None = None) -> list[list[str]]:
    """Returns what is found in steps of a hundred episodes, of whose turns such shares are cut."""
    rules = rules or LengthRules()
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
    rules = LengthRules()
    assert [f.text for f in rules.check({"response_length/clip_ratio": 0.8})] == [
        "80% of answers fill data.max_response_length"
    ]
    assert rules.fewest_cut == 1.0


def test_a_resumed_run_remembers_how_few_were_cut() -> None:
    before = Alarms(ObservedRun(config=PPOConfig(), run_dir=Path()))
    texts([0.02], before.length_rules)
    after = Alarms(ObservedRun(config=PPOConfig(), run_dir=Path()))
    after.load_state_dict(before.state_dict())
    assert texts([0.7], after.length_rules)[0]
