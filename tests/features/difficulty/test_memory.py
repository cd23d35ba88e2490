"""What is remembered of a task, by hand; pools; and that the order of telling is all the same."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from features.difficulty.memory import APT, EASY, FAILING, HARD, NEW, TaskMemory
from tests.features.difficulty.made import outcome, settings_of


def test_solve_rate_and_spread_decay_with_each_visit() -> None:
    memory = TaskMemory(2, settings_of(decay=0.5, solved_reward=1.0))
    memory.learn([outcome(0, 0.0, 0.0, 1.0, 1.0)], step=1)
    assert memory.solve_rates()[0] == 2 / 4 and memory.spreads()[0] == 0.5
    memory.learn([outcome(0, 1.0, 1.0)], step=2)
    # 2 of 4 count half: (0.5 * 2 + 2) / (0.5 * 4 + 2); the spreads 0.5 and 0 weigh 0.5 and 1.
    assert memory.solve_rates()[0] == 3 / 4
    assert memory.spreads()[0] == pytest.approx(0.5 * 0.5 / 1.5)
    assert math.isnan(memory.solve_rates()[1]) and math.isnan(memory.spreads()[1])
    assert memory.groups.tolist() == [2, 0] and memory.last_step.tolist() == [2, 0]


@pytest.mark.parametrize(("decay", "rate"), [(0.0, 1.0), (1.0, 4 / 6)])
def test_without_decay_all_visits_count_alike_and_with_all_of_it_the_last_alone(
    decay: float, rate: float
) -> None:
    memory = TaskMemory(1, settings_of(decay=decay))
    memory.learn([outcome(0, 0.0, 0.0, 1.0, 1.0)], step=1)
    memory.learn([outcome(0, 1.0, 1.0)], step=2)
    assert memory.solve_rates()[0] == pytest.approx(rate)


def test_failed_episodes_are_counted_apart() -> None:
    memory = TaskMemory(2, settings_of())
    memory.learn([outcome(0, 1.0, failed=3, tokens=40), outcome(1, failed=4, tokens=9)], step=1)
    assert memory.solve_rates()[0] == 1.0, "three that crashed say nothing"
    assert memory.failed.tolist() == [3, 4] and memory.tokens.tolist() == [40, 9]
    assert memory.visits.tolist() == [1, 0] and memory.groups.tolist() == [1, 1]
    assert memory.pools().tolist() == [EASY, FAILING]


def test_a_group_that_was_left_out_costs_its_tokens_and_tells_nothing() -> None:
    memory = TaskMemory(1, settings_of())
    memory.learn([outcome(0, tokens=50)], step=3)
    assert memory.tokens[0] == 50 and memory.groups[0] == 0 and memory.pools()[0] == NEW


def test_a_group_of_one_episode_has_no_spread() -> None:
    memory = TaskMemory(1, settings_of())
    memory.learn([outcome(0, 1.0)], step=1)
    assert math.isnan(memory.spreads()[0])


def test_pools_follow_the_bounds_which_belong_to_apt() -> None:
    memory = TaskMemory(6, settings_of(solve_rate=(0.25, 0.75), min_visits=1))
    shares = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    memory.learn(
        [outcome(task, *[1.0] * solved, *[0.0] * (4 - solved)) for task, solved in shares.items()],
        step=1,
    )
    assert memory.pools().tolist() == [HARD, APT, APT, APT, EASY, NEW]


def test_a_task_is_new_until_it_was_played_often_enough() -> None:
    memory = TaskMemory(1, settings_of(min_visits=2))
    memory.learn([outcome(0, 0.0, 0.0)], step=1)
    assert memory.pools()[0] == NEW
    memory.learn([outcome(0, 0.0, 0.0)], step=2)
    assert memory.pools()[0] == HARD


def test_rewards_that_spread_make_a_task_apt_however_rarely_it_is_solved() -> None:
    told = [outcome(0, 0.0, 0.4), outcome(1, 0.2, 0.2)]
    with_spread = TaskMemory(2, settings_of(min_spread=0.2))
    with_spread.learn(told, step=1)
    assert with_spread.pools().tolist() == [APT, HARD]
    alone = TaskMemory(2, settings_of())
    alone.learn(told, step=1)
    assert alone.pools().tolist() == [HARD, HARD]


def test_memory_does_not_depend_on_the_order_in_which_groups_and_rewards_are_told() -> None:
    draws = random.Random(0)
    outcomes = [
        outcome(draws.randrange(3), *[draws.random() for _ in range(5)], tokens=draws.randrange(9))
        for _ in range(12)
    ]
    states = []
    for _ in range(5):
        draws.shuffle(outcomes)
        memory = TaskMemory(3, settings_of())
        memory.learn(outcomes, step=1)
        states.append({name: tensor.tolist() for name, tensor in memory.state_dict().items()})
    assert all(state == states[0] for state in states)


def test_a_look_ahead_leaves_the_memory_as_it_is() -> None:
    memory = TaskMemory(2, settings_of())
    memory.learn([outcome(0, 0.0, 1.0)], step=1)
    before = memory.state_dict()
    later = memory.after([outcome(1, 1.0, 1.0)])
    assert later.pools().tolist() == [APT, EASY] and memory.pools().tolist() == [APT, NEW]
    assert all(np.array_equal(before[name], after) for name, after in memory.state_dict().items())
