"""When a batch without spread is chance, and when it is none."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict

import pytest

from features.alarms.spread import GroupSpread


def found_of(shares: list[list[bool]]) -> list[bool]:
    """Tells of each step, of groups without spread or with, whether it is suspicious."""
    spread = GroupSpread()
    found = []
    for step in shares:
        spread.add(step)
        found.append(all(step) and spread.is_suspicious())
    return found


def test_groups_that_all_had_a_spread_do_not_all_lose_it_by_chance() -> None:
    assert found_of([[False] * 8, [True] * 8, [True] * 8]) == [False, True, True]


def test_where_none_ever_had_a_spread_sixteen_groups_are_suspicious() -> None:
    assert found_of([[True] * 8]) == [True]
    assert found_of([[True] * 4] * 4) == [False, False, True, True]


def test_the_chance_of_few_groups_is_laplaces() -> None:
    """After 3 of 4 without spread, k more are with chance 4 * 5 / ((k + 4) (k + 5))."""
    spread = GroupSpread()
    spread.add([True, True, True, False])
    # 4 * 5 / (444 * 445) is above 1e-4, 4 * 5 / (445 * 446) too, and 20 / (446 * 447) is not.
    for groups, suspicious in ((437, False), (438, False), (441, False), (443, True)):
        spread.flat, spread.last = groups, 1
        assert spread.is_suspicious() == suspicious, groups


@pytest.mark.parametrize("share", [0.3, 0.7, 0.9])
def test_chance_alone_hardly_ever_makes_two_such_steps(share: float) -> None:
    rang = 0
    for seed in range(40):
        draws = random.Random(seed)
        steps = [[draws.random() < share for _ in range(4)] for _ in range(200)]
        found = found_of([[True, True, False, True], *steps])
        rang += any(one and other for one, other in itertools.pairwise(found))
    assert rang <= 2


def test_a_checkpoint_keeps_it() -> None:
    spread = GroupSpread()
    spread.add([True, False])
    spread.add([True, True])
    assert GroupSpread(**asdict(spread)) == spread
