"""Seeds and environments that somebody chose for a step's groups."""

from __future__ import annotations

from custom.env_suite import EnvironmentSuite
from data.learning_sampler import GivenTask
from data.seeds import seed_for, step_info
from training.episode_batches import as_tasks, given_tasks
from workers.rollout.episode_descriptions import describe_episodes

INFO = step_info(step=3, seed=1)


def test_a_given_seed_and_environment_are_the_groups_and_what_is_left_out_is_drawn() -> None:
    suite = EnvironmentSuite(["a", "b"], [1.0, 1.0])
    given = [GivenTask(seed=77), GivenTask(environment=0), GivenTask()]
    described = describe_episodes(3, 2, INFO, suite=suite, given=given)
    columns = described.non_tensor_batch
    own = [seed_for(1, 3, group) for group in range(3)]
    assert columns["env_seed"].tolist() == [77, 77, own[1], own[1], own[2], own[2]]
    assert columns["agent_index"].tolist() == [0, 0, 0, 0, 0, 0]
    assert describe_episodes(3, 1, INFO, suite=suite).non_tensor_batch["agent_index"].tolist() == [
        0,
        1,
        0,
    ]
    assert columns["data_source"].tolist() == ["a"] * 6


def test_rows_and_what_is_given_in_their_place_are_collated() -> None:
    plain = as_tasks([{"word": "x"}, 3])
    assert list(plain["task"]) == [{"word": "x"}, {}] and given_tasks(plain) == []
    tasks = [GivenTask(row={"word": "x"}, seed=5), GivenTask(environment=1)]
    collated = as_tasks(tasks)
    assert list(collated["task"]) == [{"word": "x"}, {}]
    assert given_tasks(collated) == tasks
    doubled = {name: column.repeat(2) for name, column in collated.items()}
    assert given_tasks(doubled, samples=2) == tasks
