"""The sampler: what it draws follows from what it was told, and from where the run stands."""

from __future__ import annotations

import torch

from data.learning_sampler import GivenTask
from features.difficulty.memory import APT, HARD, NEW
from features.difficulty.tasks import TaskSet
from tests.features.difficulty.made import GAME, config_of, draw, outcome, sampler_of, tell

ROWS = [{"prompt": f"row {number}"} for number in range(12)]
TWO_LEVELS = (
    "env_template=[{name: 'custom.envs.guess_number:GuessNumber'}, "
    "{name: 'custom.envs.guess_number:GuessNumber', kwargs: {}}]"
)


def test_the_first_steps_play_every_row_once() -> None:
    sampler = sampler_of(ROWS, "difficulty.explore=0")
    drawn = []
    for step in (1, 2, 3):
        tasks = draw(sampler, step, place=4 * (step - 1))
        drawn += tasks
        tell(sampler, step, [outcome(task, 0.0, 0.0) for task in tasks])
    assert sorted(drawn) == list(range(12))


def test_what_was_drawn_ahead_and_is_not_told_of_is_not_drawn_again() -> None:
    sampler = sampler_of(ROWS)
    drawn = [task for step in (1, 2, 3) for task in draw(sampler, step)]
    assert sorted(drawn) == list(range(12)), "three steps are drawn before the first is told of"
    tell(sampler, 1, [outcome(task, 0.0, 1.0) for task in drawn[:4]])
    assert set(draw(sampler, 4)) == set(drawn[:4]), "the others are still on their way"


def test_a_step_in_flight_of_a_checkpoint_counts_as_drawn() -> None:
    sampler = sampler_of(ROWS)
    sampler.take_back(1, [0, 1, 2, 3])
    assert not {0, 1, 2, 3} & set(draw(sampler, 2))


def test_a_step_that_is_drawn_anew_is_not_counted_twice() -> None:
    sampler = sampler_of(ROWS)
    first = draw(sampler, 1)
    assert draw(sampler, 1) == first
    assert sampler.pending == {1: first}


def test_what_a_step_told_so_far_counts_for_its_further_draws_alone() -> None:
    sampler = sampler_of(ROWS, "difficulty.explore=0")
    first = draw(sampler, 1)
    told = [outcome(task, 0.0, 0.0) for task in range(8)]
    sampler.begin_draw(1, told)
    sampler.start(epoch=0, skip=4)
    further = [next(tasks) for tasks in [iter(sampler)] for _ in range(4)]
    assert set(further) <= {8, 9, 10, 11}
    assert sampler.memory.pools().tolist() == [NEW] * 12
    assert sampler.pending == {1: first + further}


def test_a_draw_follows_from_the_state_and_the_place() -> None:
    one, other = sampler_of(ROWS), sampler_of(ROWS)
    told = [outcome(task, 0.0, float(task % 2)) for task in range(12)]
    tell(one, 1, told)
    for _ in range(3):
        draw(other, 7)
    tell(other, 7, told)
    state = one.state_dict()
    other.load_state_dict(state)
    assert draw(one, 8, place=4) == draw(other, 8, place=4)
    assert draw(one, 9, place=8) != draw(one, 10, place=4)


def test_an_epoch_has_whole_steps_and_begins_at_a_place() -> None:
    sampler = sampler_of(ROWS, per_step=5)
    assert len(sampler) == 10
    sampler.start(epoch=1, skip=5)
    assert len(list(sampler)) == 5
    assert len(sampler_of(ROWS, per_step=50)) == 50, "fewer tasks than places: they come again"


def test_rows_and_levels_make_tasks_of_both() -> None:
    config = config_of(TWO_LEVELS, "data.train_files=x.parquet")
    tasks = TaskSet(config, ROWS[:2])
    assert len(tasks) == 4 and tasks.kind == "2 rows times 2 levels"
    assert tasks[3] == GivenTask(row=ROWS[1], seed=None, environment=1)
    assert [tasks.name(number) for number in (0, 3)] == [
        "row 0 of custom.envs.guess_number:GuessNumber",
        "row 1 of custom.envs.guess_number:GuessNumber#2",
    ]


def test_seeds_are_numbers_from_nought_and_levels_alone_have_fresh_ones() -> None:
    seeds = TaskSet(config_of(GAME, "difficulty.seeds=5"), range(3))
    assert len(seeds) == 5 and seeds[4] == GivenTask(seed=4) and seeds.name(4) == "seed 4"
    levels = TaskSet(config_of(TWO_LEVELS), range(3))
    assert len(levels) == 2 and levels[1] == GivenTask(environment=1)
    assert levels.kind == "2 levels"


def test_rows_of_prompts_stay_as_they_are() -> None:
    tasks = TaskSet(config_of(), ROWS)
    assert tasks[5] is ROWS[5] and tasks.kind == "12 rows"


def test_metrics_say_what_the_tokens_were_spent_on() -> None:
    sampler = sampler_of(ROWS)
    tell(sampler, 1, [outcome(0, 0.0, 0.0, tokens=30), outcome(1, 0.0, 1.0, tokens=10)])
    assert sampler.step_metrics["difficulty/tokens_without_spread"] == 0.75
    assert sampler.step_metrics["difficulty/explored"] == 0
    tell(sampler, 2, [outcome(0, 0.0, 0.0), outcome(2, failed=2)])
    metrics = sampler.step_metrics
    assert metrics["difficulty/explored"] == 0.5, "task 0 was hard before"
    pools = {name: metrics[f"difficulty/pool/{name}"] for name in ("new", "hard", "apt", "failing")}
    assert pools == {"new": 9, "hard": 1, "apt": 1, "failing": 1}


def test_the_numbers_of_tasks_begin_with_those_that_took_the_most_tokens() -> None:
    sampler = sampler_of(ROWS)
    tell(sampler, 3, [outcome(4, 0.0, 1.0, tokens=10), outcome(2, failed=2, tokens=30)])
    first, second = sampler.numbers(most=5)
    assert (first.task, first.pool, first.solve_rate, first.failed) == ("row 2", "failing", None, 2)
    assert (second.task, second.solve_rate, second.spread, second.last_step) == (
        "row 4",
        0.5,
        0.5,
        3,
    )
    assert len(sampler.numbers(most=1)) == 1


def test_a_state_is_a_copy() -> None:
    sampler = sampler_of(ROWS)
    state = sampler.state_dict()
    tell(sampler, 1, [outcome(0, 0.0, 0.0)])
    assert torch.equal(state["memory"]["groups"], torch.zeros(12, dtype=torch.int64))
    assert sampler.memory.pools()[0] == HARD and APT not in sampler.memory.pools()
