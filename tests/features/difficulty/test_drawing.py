"""How a step's tasks are drawn: shares by hand, turns, and that every task comes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from features.difficulty.drawing import draw_tasks
from features.difficulty.memory import APT, EASY, FAILING, HARD, NEW

APT_TASKS = range(10)
OTHERS = range(10, 40)
# 8 apt and 2 new ones; 10 hard, 15 easy and 5 failing ones.
POOLS = np.array([APT] * 8 + [NEW] * 2 + [HARD] * 10 + [EASY] * 15 + [FAILING] * 5)


def draws(
    times: int,
    explore: float,
    pools: np.ndarray = POOLS,
    places: int = 8,
    may_repeat: bool = False,
) -> list[list[int]]:
    """Draws of as many steps, which know nothing of each other."""
    pending = np.zeros(len(pools), dtype=np.int64)
    return [
        draw_tasks(
            pools,
            places,
            explore,
            pending,
            np.random.default_rng(seed),
            may_repeat=may_repeat,
        )
        for seed in range(times)
    ]


def test_each_task_has_the_share_of_its_part() -> None:
    steps = draws(4000, explore=0.2)
    counts = Counter(task for step in steps for task in step)
    # Of 8 places 1.6 are for 30 tasks, 6.4 for 10 tasks.
    for task in OTHERS:
        assert counts[task] / 4000 == pytest.approx(1.6 / 30, rel=0.25), task
    for task in APT_TASKS:
        assert counts[task] / 4000 == pytest.approx(6.4 / 10, rel=0.05), task
    explored = [sum(task in OTHERS for task in step) for step in steps]
    assert set(explored) == {1, 2} and np.mean(explored) == pytest.approx(1.6, abs=0.03)


def test_a_part_that_is_empty_leaves_its_places_to_the_other() -> None:
    only_hard = np.full(6, HARD)
    assert sorted(draws(1, explore=0.1, pools=only_hard, places=6)[0]) == list(range(6))
    only_apt = np.full(6, APT)
    assert sorted(draws(1, explore=0.9, pools=only_apt, places=6)[0]) == list(range(6))


def test_a_task_comes_twice_only_once_the_others_of_its_part_came() -> None:
    for step in draws(50, explore=0.0, places=25, may_repeat=True):
        counts = Counter(step)
        assert set(counts) == set(APT_TASKS)
        assert set(counts.values()) == {2, 3} and len(step) == 25


def test_a_few_apt_tasks_do_not_fill_a_step() -> None:
    for step in draws(50, explore=0.1, places=25):
        assert len(set(step)) == 25
        assert set(APT_TASKS) <= set(step)


def test_all_come_once_before_any_comes_twice() -> None:
    pools = np.array([APT, HARD, HARD, EASY])
    for step in draws(50, explore=0.0, pools=pools, places=10):
        counts = Counter(step)
        assert set(counts.values()) <= {2, 3} and counts[0] == 3


def test_what_is_drawn_already_waits_for_the_others() -> None:
    pending = np.zeros(len(POOLS), dtype=np.int64)
    pending[:6] = 1
    for seed in range(20):
        drawn = draw_tasks(POOLS, 4, 0.0, pending, np.random.default_rng(seed))
        assert sorted(drawn) == [6, 7, 8, 9]


def test_every_task_is_explored_though_nobody_learns_anything() -> None:
    seen = {task for step in draws(600, explore=0.1) for task in step}
    assert seen == set(range(len(POOLS)))


def test_without_exploration_tasks_that_are_not_apt_do_not_come() -> None:
    seen = {task for step in draws(200, explore=0.0) for task in step}
    assert seen == set(APT_TASKS)


def test_the_same_generator_draws_the_same_and_pending_stays_as_it_is() -> None:
    pending = np.arange(len(POOLS)) % 3
    before = pending.copy()
    one, other = (draw_tasks(POOLS, 30, 0.3, pending, np.random.default_rng(7)) for _ in range(2))
    assert one == other and np.array_equal(pending, before)
