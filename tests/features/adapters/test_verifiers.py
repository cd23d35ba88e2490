"""Tests verifiers' environments, on tasksets written here.

Needs verifiers 0.4, which vllm's packages exclude.
"""

import math
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from custom.env_calls import reset_environment, step_environment
from custom.env_factory import make_environment
from tests.features.adapters.test_reasoning_gym import ODD_TEXTS

SUMS = """
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task, trace) -> float:
        return 0.5 * (task.answer in trace.last_reply)

    @vf.metric
    async def length(self, trace) -> float:
        return len(trace.last_reply)

class Config(vf.TasksetConfig):
    rows: int = 7

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.rows):
            data = Data(
                prompt=f"What is {i} + {i}?",
                system_prompt="Answer with a number.",
                answer=str(2 * i),
            )
            yield Sum(data, self.config.task)
"""
HALVES = """
import verifiers.v1 as vf

__all__ = ["Halves", "HalvesEnv"]

class Data(vf.TaskData):
    number: int

class Half(vf.Task[Data, vf.State, vf.TaskConfig]):
    pass

class Halves(vf.Taskset[Half, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        number = 0
        while True:
            number += 1
            data = Data(prompt="Guess a number from 0 to 9.", number=number % 10)
            yield Half(data, self.config.task)

class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=4)

class HalvesEnv(vf.Env[Config]):
    async def run(self, task, agents):
        won = 0.0
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated:
                guess = int(said.last_reply)
                if guess == task.data.number:
                    won = 1.0
                    break
                said = await talk.turn("higher" if guess < task.data.number else "lower")
        talk.trace.record_reward("won", won)
"""
DEBATE = HALVES.replace(
    "class Config(vf.EnvConfig):",
    "class Config(vf.EnvConfig):\n    user: vf.AgentConfig = vf.AgentConfig()",
)
IN_A_BOX = SUMS.replace("(self, task, trace)", "(self, task, trace, runtime)")


@pytest.fixture(scope="module", autouse=True)
def tasksets(tmp_path_factory):
    pytest.importorskip(
        "verifiers.v1", reason="verifiers 0.4 is not installed (it excludes vllm's openai and mcp)"
    )
    folder = tmp_path_factory.mktemp("tasksets")
    for name, code in {
        "sums": SUMS,
        "halves": HALVES,
        "debate_env": DEBATE,
        "boxed": IN_A_BOX,
    }.items():
        (folder / f"written_{name}.py").write_text(code)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def test_a_single_turn_shows_the_rows_messages_and_is_scored_by_its_rewards():
    env = make_environment("verifiers:written_sums")
    assert env.max_turns == 1
    assert reset_environment(env, 10) == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "What is 3 + 3?"},
    ]
    step = step_environment(env, "It is 6.")
    assert (step.reward, step.done, step.info) == (1.0, True, {"metrics": {"length": 8.0}})
    assert step_environment(env, "6").observation == "The episode is over."
    reset_environment(env, 3)
    assert step_environment(env, "7").reward == 0.0
    env.close()


def test_a_game_of_several_turns_goes_on_until_it_is_won_or_its_turns_are_used_up():
    env = make_environment("verifiers:written_halves", {"prompt_template": "{name}: {prompt}"})
    assert env.max_turns == 4
    assert reset_environment(env, 6)[0]["content"] == "written_halves: Guess a number from 0 to 9."
    told = [step_environment(env, guess) for guess in ("3", "9", "7")]
    assert [step.observation[0]["content"] for step in told[:2]] == ["higher", "lower"]
    assert [(step.reward, step.done) for step in told] == [(0.0, False), (0.0, False), (1.0, True)]
    reset_environment(env, 6)
    lost = [step_environment(env, "1") for _ in range(4)]
    assert [step.done for step in lost] == [False, False, False, True] and lost[-1].reward == 0.0
    env.close()


@pytest.mark.parametrize("name", ["written_sums", "written_halves"])
def test_no_text_raises_and_every_reward_is_finite(name):
    env = make_environment(f"verifiers:{name}")
    for text in ODD_TEXTS:
        reset_environment(env, 1)
        step = step_environment(env, text)
        assert (math.isfinite(step.reward) and step.reward <= 0) or step.info.get("metrics")
    env.close()


@pytest.mark.parametrize("name", ["written_sums", "written_halves"])
def test_equal_seeds_give_equal_first_observations_in_two_threads(name):
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            random.random(), np.random.rand()

    def first_observations(_):
        env = make_environment(f"verifiers:{name}")
        first = [str(reset_environment(env, seed)) for seed in range(100)]
        env.close()
        return first

    with ThreadPoolExecutor(3) as pool:
        pool.submit(draw)
        one, other = pool.map(first_observations, range(2))
        stop.set()
    assert one == other


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("no_such_taskset", {}, "cannot be made with .*not found"),
        ("written_sums", {"wors": 1}, "wors"),
        ("written_sums", {"rows": 0}, "has no rows"),
        (
            "written_debate_env",
            {},
            "has agents besides the policy, which need a model: user, player",
        ),
        ("written_boxed", {}, "has rewards that need a runtime: right"),
    ],
)
def test_what_cannot_be_played_says_why(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_environment(f"verifiers:{name}", kwargs)
