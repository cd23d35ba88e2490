"""A weighted mix of environments: counts, order, seeds, and samplers that change the weights."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from custom.env_suite import EnvironmentSuite
from data.seeds import step_info
from examples.curriculum import SuccessCurriculum
from training.agent_trainer import make_suite
from training.config import AgentConfig, PPOConfig
from workers.multi_turn_rollout import agent_specs, describe_episodes

GUESS = {"name": "custom.envs.guess_number:GuessNumber"}


def test_equal_weights_play_in_turn() -> None:
    assert EnvironmentSuite(["a", "b", "c"], [2, 2, 2]).choose(range(4, 9), seed=3) == [
        1,
        2,
        0,
        1,
        2,
    ]


@given(
    st.lists(st.floats(0.01, 10), min_size=1, max_size=6),
    st.integers(1, 200),
    st.integers(0, 2**31),
)
def test_counts_are_within_one_of_what_the_weights_say(
    weights: list[float], groups: int, seed: int
) -> None:
    suite = EnvironmentSuite([str(i) for i in range(len(weights))], weights)
    counts = Counter(suite.choose(range(groups), seed))
    for index, weight in enumerate(weights):
        assert abs(counts[index] - groups * weight / sum(weights)) <= 1 + 1e-6
    assert suite.choose(range(groups), seed) == suite.choose(range(groups), seed)


def test_a_curriculum_gives_more_episodes_to_what_is_neither_certain_nor_hopeless() -> None:
    suite = SuccessCurriculum(["easy", "fair", "hopeless"], [1, 1, 1])
    for _ in range(40):
        suite.update({"easy": [1.0] * 4, "fair": [0.0, 1.0], "hopeless": [0.0]})
    easy, fair, hopeless = suite.weights
    assert fair > 3 * easy and fair > 3 * hopeless and min(suite.weights) > 0
    resumed = SuccessCurriculum(["easy", "fair", "hopeless"], [1, 1, 1])
    resumed.load_state_dict(suite.state_dict())
    assert resumed.weights == pytest.approx(suite.weights)


def test_members_of_a_group_play_the_same_environment_under_its_name() -> None:
    suite = EnvironmentSuite(["a", "b"], [3, 1])
    described = describe_episodes(8, 2, step_info(step=1, seed=0), suite=suite)
    agents, sources = (
        described.non_tensor_batch[name].tolist() for name in ("agent_index", "data_source")
    )
    assert agents[::2] == agents[1::2] and Counter(agents) == {0: 12, 1: 4}
    assert sources == [suite.names[agent] for agent in agents]
    validated = describe_episodes(4, 1, step_info(step=1, seed=0, validate=True), suite=suite)
    assert validated.non_tensor_batch["agent_index"].tolist() == [0, 1, 0, 1]


def test_the_choice_tells_nothing_of_what_the_chosen_environment_draws() -> None:
    suite = EnvironmentSuite(["a", "b"], [1, 1.0001])
    alike = 0
    for step in range(400):
        columns = describe_episodes(1, 1, step_info(step=step, seed=0), suite=suite)
        [chosen] = columns.non_tensor_batch["agent_index"].tolist()
        [seed] = columns.non_tensor_batch["env_seed"].tolist()
        alike += chosen == (random.Random(seed).random() >= 0.5)
    # 200 by chance, give or take 10; all of them where both draw from one series.
    assert 160 <= alike <= 240


def test_the_config_gives_names_weights_and_limits() -> None:
    entries = (
        {**GUESS, "weight": 2.0, "max_turn": 3},
        {**GUESS, "kwargs": {"high": 5}},
    )
    config = PPOConfig(env_template=entries, agent=AgentConfig(max_turn=7))
    suite = make_suite(config, agent_specs(config))
    assert suite.names == [
        "custom.envs.guess_number:GuessNumber",
        "custom.envs.guess_number:GuessNumber#2",
    ] and suite.weights == [2.0, 1.0]
    assert [spec.max_turn for spec in agent_specs(config)] == [3, None]


@pytest.mark.parametrize("weights", [[float("nan"), 1], [-1, 2], [float("inf"), 1], [1, 2, 3]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    suite = EnvironmentSuite(["a", "b"], [1, 1])
    suite.weights = weights
    with pytest.raises(ValueError, match=r"EnvironmentSuite.weights=.*for each of a, b"):
        suite.choose(range(8), seed=0)
