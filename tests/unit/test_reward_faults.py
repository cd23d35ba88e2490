"""A reward function that fails says so with file and line, and is no crash of the environment."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from custom.agent import Agent, AgentSpec, reward_of
from custom.env import BadRewardFunction, BaseEnvironment, Trajectory
from custom.env_calls import located
from custom.trial import play_trial
from workers.environments.names import CannotBuild
from workers.environments.pool import EnvironmentPool
from workers.environments.reply import StepReply
from workers.rollout.episode import Episode, TurnLimits
from workers.rollout.episode_play import play_episode

SOURCE = """
def sometimes(trajectory):
    if trajectory.seed % 2:
        return None
    return 1.0

def raises(trajectory):
    return trajectory.infos[0]["solved"]

class Scorer:
    def __call__(self, trajectory):
        return "ten"
scorer = Scorer()
"""


class Echo(BaseEnvironment):
    def reset(self, seed: int | None = None) -> str:
        return "say something"

    def step(self, action: str) -> tuple[Any, ...]:
        return action, 0.5, True, {}

    def sample_action(self, generator: random.Random) -> str:
        return str(generator.random())


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(SOURCE)
    return file


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sometimes", r"reward_fn \(.*rewards.py:2\) returned the reward None"),
        ("raises", r"reward_fn \(.*rewards.py:7\) raised KeyError: 'solved' in .*rewards.py:8$"),
        ("scorer", r"reward_fn \(.*rewards.py:11\) returned the reward 'ten'"),
    ],
)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_reward_function_that_fails_is_no_crash(
    rewards: Path, name: str, words: str, isolation: Any
) -> None:
    spec = AgentSpec(Echo, reward_path=str(rewards), reward_name=name)
    with EnvironmentPool([spec], isolation=isolation) as pool:
        reply = StepReply()
        for call in (
            lambda: pool.reset(0, 0, 1),
            lambda: pool.step(0, "a"),
            lambda: pool.finish(0, "done"),
        ):
            call()
            [(_, reply)] = pool.poll(60)
    assert reply.failure == "reward_fault"
    with pytest.raises(BadRewardFunction, match=words):
        raise BadRewardFunction(reply.error)


def test_an_episode_whose_reward_function_failed_ends_the_run() -> None:
    """It is not played again: that would choose the episodes for which the function works."""
    limits = TurnLimits(prompt_length=8, response_length=8, max_model_len=16)
    play = play_episode(Episode(group=0, sample=0, seed=1), None, limits, object(), [None])  # type: ignore[arg-type]
    next(play)
    with pytest.raises(BadRewardFunction, match=r"mine\.py:3"):
        play.send(StepReply(failure="reward_fault", error="reward_fn (mine.py:3) returned None"))


def test_the_trial_finds_a_reward_function_that_fails_in_some_episodes(rewards: Path) -> None:
    agent = AgentSpec(Echo, reward_path=str(rewards), reward_name="sometimes").build()
    with pytest.raises(BadRewardFunction, match=r"rewards.py:2\) returned the reward None"):
        play_trial(agent, seed=0, episodes=2, max_turn=1)


def test_an_environment_that_raises_is_still_a_crash() -> None:
    class Breaks(Echo):
        def step(self, action: str) -> tuple[Any, ...]:
            raise KeyError(action)

    trial = play_trial(Agent(Breaks()), seed=0, episodes=1, max_turn=1)
    assert all(outcome.crashes == 1 for outcome in trial.outcomes.values())


def test_arguments_that_a_reward_function_does_not_take_are_its_fault() -> None:
    def three(trajectory: Any, environment: Any, weight: Any) -> float:
        return 1.0

    with pytest.raises(BadRewardFunction, match=r"three\(\) missing 1 required"):
        reward_of(three, Trajectory(), None)
    assert located(partial(three, weight=1), "three").startswith("three (")
    spec = AgentSpec(Echo, reward_fn=three)
    words = r"reward_fn \(.*\.py:\d+\) takes \(trajectory.*it is called as reward_fn\(trajectory\)"
    with EnvironmentPool([spec]) as pool, pytest.raises(CannotBuild, match=words):
        _ = pool.tool_schemas
    AgentSpec(Echo, reward_fn=three, reward_kwargs={"weight": 1}).build()
