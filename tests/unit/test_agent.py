"""Tests agents: conversations, rewards of whole episodes, and specs that build them anywhere."""

import multiprocessing
import pickle
import threading
from functools import partial
from typing import ClassVar

import pytest

from custom.agent import Agent, AgentSpec, CheckedAgent, copy_environment
from custom.env import BadEnvironment, BaseEnvironment, Trajectory
from custom.envs.guess_number import GuessNumber, GuessNumberConfig
from custom.envs.simple_game import SimpleGameEnvironment

GUESS = "custom.envs.guess_number:GuessNumber"


class Room(BaseEnvironment):
    """Has a prefix, a state, and observations that hold the state every other turn."""

    closed = 0

    def reset(self):
        self.turn = 0
        return "You wake up."

    def step(self, action):
        self.turn += 1
        text = "It is dark." if self.turn % 2 else f"You hear: {self.get_state_description()}!"
        return text, 0.5, self.turn == 3, {"turn": self.turn}

    def get_state_description(self):
        return f"Turn {self.turn}"

    def get_prompt_prefix(self):
        return "Be brief."

    def close(self):
        self.closed += 1


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


# The conversation


def test_a_conversation_has_the_prefix_and_the_state_where_the_observation_lacks_it():
    agent = Agent(Room())
    assert agent.reset(0) == [system("Be brief."), user("You wake up.\nTurn 0")]
    assert agent.step("wait") == ([user("It is dark.\nTurn 1")], 0.5, False, {"turn": 1})
    assert agent.step("wait")[0] == [user("You hear: Turn 2!")]
    assert agent.step("wait") == ([user("It is dark.\nTurn 3")], 0.5, True, {"turn": 3})
    assert agent.trajectory == Trajectory(
        states=[
            "You wake up.\nTurn 0",
            "It is dark.\nTurn 1",
            "You hear: Turn 2!",
            "It is dark.\nTurn 3",
        ],
        actions=["wait"] * 3,
        rewards=[0.5] * 3,
        dones=[False, False, True],
        infos=[{"turn": 1}, {"turn": 2}, {"turn": 3}],
        seed=0,
    )
    assert (
        agent.tool_schemas is None
        and agent.episode_reward("done") is None
        and agent.trajectory.ending == "done"
    )


class TextGameEnv(BaseEnvironment):
    """Does the least: its steps return the state itself, and its reset leaves `_done` as it was."""

    def reset(self) -> str:
        self.score = 0
        self.inventory = []
        return "Welcome to the game! You are in a room."

    def step(self, action: str) -> tuple:
        reward = 1.0 if "take" in action else -0.1
        if "attack" in action:
            reward, self._done = 5.0, True
        self.score += reward
        return self.get_state_description(), reward, self._done, {}

    def get_state_description(self) -> str:
        return f"Score: {self.score}, Inventory: {self.inventory}"


def test_a_game_whose_reset_forgets_done_can_be_played_again():
    agent = AgentSpec(TextGameEnv()).build()
    for seed in range(2):
        assert agent.reset(seed)[-1]["content"].endswith("in a room.\nScore: 0, Inventory: []")
        assert agent.step("take it") == ([user("Score: 1.0, Inventory: []")], 1.0, False, {})
        assert agent.step("attack")[1:] == (5.0, True, {})


def test_the_state_can_be_left_out_and_an_environment_needs_only_reset_and_step():
    assert Agent(Room(), include_state=False).reset(0) == [
        system("Be brief."),
        user("You wake up."),
    ]

    class Bare:
        def reset(self):
            return "Go."

        def step(self, action):
            return "", 1.0, True, {}

    agent = Agent(Bare())
    assert agent.reset(0) == [user("Go.")]
    assert agent.step("x") == ([user("")], 1.0, True, {})
    agent.close()


def test_every_reset_starts_a_fresh_trajectory_and_leaves_the_old_one_whole():
    agent = Agent(Room())
    agent.reset(1)
    agent.step("a")
    first = agent.trajectory
    agent.reset(2)
    assert (len(first), len(agent.trajectory), agent.trajectory.seed) == (1, 0, 2)


def test_messages_of_the_environments_own_are_kept_with_the_state_in_the_last():
    class Chatty(Room):
        def reset(self):
            super().reset()
            return [
                system("Mine."),
                user("Hello"),
                {"role": "assistant", "content": "Yes?"},
                user("Go."),
            ]

    messages = Agent(Chatty()).reset(0)
    assert [m["content"] for m in messages] == ["Mine.", "Hello", "Yes?", "Go.\nTurn 0"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]


def test_observation_and_state_together_keep_to_the_limit():
    class Long(Room):
        def get_state_description(self):
            return "s" * 10_000

    agent = Agent(Long(), max_observation_chars=500)
    assert (
        len(agent.reset(0)[-1]["content"]) == 500 and len(agent.step("a")[0][0]["content"]) == 500
    )


def test_a_state_that_is_no_text_is_a_bad_environment():
    class Wrong(Room):
        def get_state_description(self):
            return {"turn": 1}

    with pytest.raises(BadEnvironment, match=r"Wrong.get_state_description returned \{'turn': 1\}"):
        Agent(Wrong()).reset(0)


# Tools

TOOLS = """
from custom.tools import Tool, ToolDefinition

class Multiply(Tool):
    number = {"type": "integer"}
    properties = {"a": number, "b": number}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    definition = ToolDefinition("multiply", "Multiplies.", parameters)

    def execute(self, a, b):
        return str(a * b)
"""


def test_with_tools_calls_become_observations_and_all_else_goes_to_the_environment(tmp_path):
    pytest.importorskip("custom.tools")
    (tmp_path / "tools.py").write_text(TOOLS)
    spec = AgentSpec(
        "custom.envs.tool_arithmetic:ToolArithmetic", tools=(f"{tmp_path}/tools.py:Multiply",)
    )
    agent = pickle.loads(pickle.dumps(spec)).build()
    assert [schema["function"]["name"] for schema in agent.tool_schemas] == ["multiply"]
    rules, question = agent.reset(0)
    assert rules["role"] == "system" and question["content"].startswith("What is ")
    a, _, b, _, c = question["content"].removeprefix("What is ").removesuffix("?").split()
    call = f'<tool_call>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
    messages, reward, done, info = agent.step(call)
    assert (messages, reward, done) == ([user(str(int(a) * int(b)))], 0.0, False)
    (record,) = info["tool_calls"]
    assert record.pop("seconds") >= 0 and record == {
        "name": "multiply",
        "ok": True,
        "error_kind": "",
    }
    assert (
        agent.step(call.replace(a, '"x"', 1))[3]["tool_calls"][0]["error_kind"] == "bad_arguments"
    )
    messages, reward, done, info = agent.step(str(int(a) * int(b) + int(c)))
    assert (messages, reward, done, info) == ([user("Correct.")], 1.0, True, {"tool_calls": []})
    assert agent.trajectory.rewards == [0.0, 0.0, 1.0]


# Rewards of whole episodes


def with_both(trajectory, environment):
    return sum(trajectory.rewards) + environment.turn


def with_one(trajectory):
    return len(trajectory)


def with_option(trajectory, scale=3):
    return scale * len(trajectory)


def with_named_default(trajectory, environment=None, bonus=0.0):
    return environment.turn + bonus


class Scorer:
    def score(self, trajectory, env):
        return env.turn * 10


@pytest.mark.parametrize(
    ("reward_fn", "expected"),
    [
        (with_both, 3.0),
        (with_one, 2.0),
        (lambda t: sum(t.rewards), 1.0),
        (lambda *both: len(both), 2.0),
        (with_option, 6.0),
        (with_named_default, 2.0),
        (partial(with_named_default, bonus=0.5), 2.5),
        (Scorer().score, 20.0),
    ],
)
def test_a_reward_fn_takes_one_argument_or_two_and_replaces_the_turns_rewards(reward_fn, expected):
    agent = Agent(Room(), reward_fn=reward_fn)
    agent.reset(0)
    assert agent.step("a")[1:] == (0.0, False, {"turn": 1, "environment_reward": 0.5})
    agent.step("b")
    assert agent.episode_reward("max_turns") == expected
    assert agent.trajectory.rewards == [0.5, 0.5] and agent.trajectory.ending == "max_turns"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1"])
def test_an_episodes_reward_must_be_finite(value):
    agent = Agent(Room(), reward_fn=lambda t: value)
    agent.reset(0)
    with pytest.raises(BadEnvironment, match=r"reward_fn \(.*py:\d+\) returned the reward"):
        agent.episode_reward("done")


# Specs


@pytest.mark.seconds
def test_a_spec_survives_pickling_and_builds_equal_agents_in_another_process():
    spec = AgentSpec(GUESS, {"high": 50}, reward_kwargs={"a": 1})
    assert pickle.loads(pickle.dumps(spec)) == spec
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(first_messages, (spec, 7)) == first_messages(spec, 7)


def first_messages(spec, seed):
    return spec.build().reset(seed)


def test_an_object_a_class_and_a_factory_all_make_agents_with_environments_of_their_own():
    given = GuessNumber(GuessNumberConfig(high=30))
    for spec in (
        AgentSpec(given),
        AgentSpec(GuessNumber, kwargs={"high": 30}),
        AgentSpec(lambda: GuessNumber(GuessNumberConfig(high=30))),
    ):
        one, other = spec.build(), spec.build()
        assert one.environment is not other.environment is not given
        assert one.reset(3) == other.reset(3) and "1 to 30" in one.reset(3)[0]["content"]


def test_an_object_that_cannot_be_copied_is_rebuilt_from_its_config():
    class Locked(GuessNumber):
        def __init__(self, config=None):
            super().__init__(config)
            self.lock = threading.Lock()

    copied = copy_environment(Locked(GuessNumberConfig(high=77)))
    assert copied.config.high == 77


def test_an_environment_that_takes_no_template_is_told_of_it():
    with pytest.raises(ValueError, match=r"GuessNumber takes .*, not \['prompt_template'\]"):
        AgentSpec(GUESS, prompt_template="{question}").build()


def test_a_reward_function_comes_from_a_file_with_its_arguments(tmp_path):
    file = tmp_path / "my_reward.py"
    file.write_text(
        "def count(trajectory, environment, per_turn): return per_turn * len(trajectory)\n"
    )
    agent = AgentSpec(
        GUESS, reward_path=str(file), reward_name="count", reward_kwargs={"per_turn": 0.5}
    ).build()
    agent.reset(0)
    agent.step("5"), agent.step("6")
    assert agent.episode_reward("done") == 1.0


def test_without_an_environment_an_agent_class_is_needed():
    with pytest.raises(ValueError, match="an environment is made from a class or a function"):
        AgentSpec(None).build()


# An agent class of one's own

OWN_AGENTS = """
from custom.agent import Agent

class Polite(Agent):
    def step(self, response_text):
        messages, reward, done, info = super().step(response_text.removeprefix("please "))
        return messages, reward + ("please" in response_text), done, info

class Alone:
    def __init__(self): self.closed = False
    def reset(self, seed): return [{"role": "user", "content": f"seed {seed}"}]
    def step(self, response_text): return "more", 1, len(response_text) > 3, {}
    def close(self): self.closed = True

class Rude:
    def __init__(self, environment, include_state): self.answer = None
    def reset(self, seed): return []
    def step(self, response_text): return self.answer
"""


@pytest.fixture
def own_agents(tmp_path):
    file = tmp_path / "agents.py"
    file.write_text(OWN_AGENTS)
    return str(file)


def test_a_subclass_by_path_plays_and_its_rewards_count(own_agents):
    agent = AgentSpec(
        SimpleGameEnvironment, agent_path=own_agents, agent_name="Polite", reward_fn=None
    ).build()
    agent.reset(0)
    item = agent.environment.here[0]
    messages, reward, done, _ = agent.step(f"please take {item}")
    assert messages == [user(f"You have the {item}.\nScore: 1.0, inventory: {item}")]
    assert (reward, done, agent.trajectory.rewards) == (2.0, False, [2.0])
    agent.close()
    assert agent.environment._done


def test_an_agent_that_is_no_agent_of_ours_plays_without_an_environment(own_agents):
    spec = AgentSpec(
        None, agent_path=own_agents, agent_name="Alone", reward_fn=lambda t: len(t) + 0.5
    )
    agent = spec.build()
    assert isinstance(agent, CheckedAgent) and agent.tool_schemas is None
    assert agent.reset(4) == [user("seed 4")]
    assert agent.step("hm") == ([user("more")], 0.0, False, {"environment_reward": 1.0})
    assert agent.step("long") == ([user("more")], 0.0, True, {"environment_reward": 1.0})
    assert agent.episode_reward("done") == 2.5
    assert (agent.trajectory.states, agent.trajectory.actions) == (
        ["seed 4", "more", "more"],
        ["hm", "long"],
    )
    agent.close()
    assert agent.inner.closed


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, r"Rude.step \(.*py:\d+\) returned None \(NoneType\); allowed: "),
        (("x", 1.0, True), r"Rude.step \(.*py:\d+\) returned"),
        (("x", 1.0, True, 3), r"Rude.step \(.*py:\d+\) returned the info 3"),
        ((3, 1.0, True, {}), r"Rude.step \(.*py:\d+\) returned the observation 3"),
        (("x", float("nan"), True, {}), r"Rude.step \(.*py:\d+\) returned the reward nan"),
        (("x", 1.0, "no", {}), r"Rude.step \(.*py:\d+\) returned done='no'"),
    ],
)
def test_what_a_foreign_agent_returns_is_checked(own_agents, answer, message):
    agent = AgentSpec(GUESS, agent_path=own_agents, agent_name="Rude").build()
    with pytest.raises(BadEnvironment, match=r"Rude.reset.* returned no message"):
        agent.reset(0)
    agent.inner.answer = answer
    with pytest.raises(BadEnvironment, match=message):
        agent.step("x")


def test_an_episode_reward_of_a_subclass_counts_where_there_is_no_reward_fn():
    class Own(Agent):
        calls: ClassVar[list[str]] = []

        def episode_reward(self, ending):
            self.calls.append(ending)
            return 4

    agent = AgentSpec(GUESS, agent_cls=Own).build()
    agent.reset(0)
    assert agent.episode_reward("done") == 4.0 and Own.calls == ["done"]
    other = AgentSpec(GUESS, agent_cls=Own, reward_fn=lambda t: 1.0).build()
    other.reset(0)
    assert other.episode_reward("done") == 1.0
