"""Environments: the boundary at which they are called, and the examples."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from custom.env import BadEnvironment, BaseEnvironment, EnvironmentConfig, StepResult, Trajectory
from custom.env_calls import check_observation, cut_middle, reset_environment, step_environment
from custom.env_factory import make_environment
from custom.envs.guess_number import GuessNumber, GuessNumberConfig
from custom.envs.simple_game import SimpleGameEnvironment
from custom.envs.text_adventure import TextAdventure
from custom.envs.tool_arithmetic import ToolArithmetic, ToolArithmeticConfig
from custom.own_generators import OwnGenerators
from tests.conftest import PROJECT


class Scripted(BaseEnvironment):
    """Returns what it is told to."""

    def __init__(self, reset="start", step=("next", 0.0, False, {})):
        super().__init__()
        self.answers = reset, step

    def reset(self):
        return self.answers[0]

    def step(self, action):
        return self.answers[1]


# The boundary


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (("next", 1, False, {}), StepResult("next", 1.0, False, {})),
        (("next", 0.5, False, True, {"a": 1}), StepResult("next", 0.5, True, {"a": 1})),
        (("next", 0.5, True, False, {}), StepResult("next", 0.5, True, {})),
        (("next", 0.5, False, False, {}), StepResult("next", 0.5, False, {})),
        (["next", True, 1, None], StepResult("next", 1.0, True, {})),
        (("next", np.float32(0.5), np.bool_(True), {}), StepResult("next", 0.5, True, {})),
        (("next", torch.tensor([2.0]), np.int64(0), {}), StepResult("next", 2.0, False, {})),
        (("", 0.0, True, {}), StepResult("", 0.0, True, {})),
        ((np.str_("next"), 0.0, True, {}), StepResult("next", 0.0, True, {})),
        (
            ([{"role": "tool", "content": "3"}], 0.0, True, {}),
            StepResult([{"role": "tool", "content": "3"}], 0.0, True, {}),
        ),
    ],
)
def test_four_and_five_values_become_one_result(answer, expected):
    assert step_environment(Scripted(step=answer), "go") == expected


class Unprintable:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            None,
            r"Scripted.step \(.*py:\d+\) returned None \(NoneType\); "
            r"allowed: \(observation, reward, done, info\) or",
        ),
        ("next", "returned 'next'"),
        (("next", 0.0, True), "returned .'next', 0.0, True."),
        (("next", float("nan"), True, {}), r"the reward nan \(float\); allowed: a finite number"),
        (("next", float("inf"), True, {}), "the reward inf"),
        (("next", 1e39, True, {}), "the reward 1e"),
        (("next", 10**400, True, {}), "the reward 1000"),
        (("next", "1.0", True, {}), r"the reward '1.0' \(str\)"),
        (("next", None, True, {}), "the reward None"),
        (("next", [1.0, 2.0], True, {}), "the reward"),
        (("next", torch.zeros(2), True, {}), "the reward"),
        (("next", 1j, True, {}), "the reward 1j"),
        (("next", 0.0, "yes", {}), "done='yes'"),
        (("next", 0.0, None, {}), "done=None"),
        (("next", 0.0, True, False, [1]), r"the info \[1\]"),
        (
            (3, 0.0, True, {}),
            r"the observation 3 \(int\); allowed: a string, or a list of messages",
        ),
        ((None, 0.0, True, {}), "the observation None"),
        ((b"next", 0.0, True, {}), "the observation b'next'"),
        (([{"role": "king", "content": "x"}], 0.0, True, {}), "the observation"),
        (([{"role": "user", "content": None}], 0.0, True, {}), "the observation"),
        ((Unprintable(), 0.0, True, {}), "a Unprintable that cannot be printed"),
        ((list(range(10**6)), 0.0, True, {}), r"the observation \[0, 1, "),
    ],
)
def test_anything_else_is_a_bad_environment_that_says_what_came(answer, message):
    with pytest.raises(BadEnvironment, match=message) as caught:
        step_environment(Scripted(step=answer), "go")
    assert len(str(caught.value)) < 500


def test_reset_takes_gymnasiums_pair_and_refuses_the_rest():
    assert reset_environment(Scripted(reset=("start", {"a": 1})), 0) == "start"
    with pytest.raises(
        BadEnvironment, match=r"Scripted.reset \(.*py:\d+\) returned the observation \('start', 1\)"
    ):
        reset_environment(Scripted(reset=("start", 1)), 0)
    with pytest.raises(BadEnvironment, match=r"Scripted.reset.* returned no message"):
        reset_environment(Scripted(reset=[]), 0)


def test_reset_clears_done_also_where_a_subclass_does_not():
    env = Scripted()
    env._done = True
    reset_environment(env, 0)
    assert env._done is False


def test_a_long_observation_is_cut_in_the_middle_with_a_mark():
    text = step_environment(
        Scripted(step=("a" * 600_000 + "b" * 400_000, 0.0, True, {})), "", 1000
    ).observation
    assert len(text) == 1000 and text.startswith("a" * 400) and text.endswith("b" * 400)
    assert "999,000 characters or more left out" in text
    messages = check_observation([{"role": "user", "content": "x" * 900}] * 2, "here", 1000)
    assert [len(message["content"]) for message in messages] == [500, 500]


@given(st.text(max_size=300), st.integers(0, 200))
def test_a_cut_text_is_never_longer_than_asked_and_a_short_one_is_untouched(text, limit):
    cut = cut_middle(text, limit)
    assert cut == text if len(text) <= limit else len(cut) <= limit


@given(st.text(alphabet=st.characters(), max_size=50))
def test_every_observation_can_be_encoded(text):
    passed = check_observation(text + "\ud800", "here")
    assert passed.encode() and len(passed) == len(text) + 1


# Seeds


class DrawsFromGlobals(BaseEnvironment):
    def reset(self):
        return f"{random.random()} {np.random.rand()}"

    def step(self, action):
        return "", 0.0, True, {}


class TakesAnything(DrawsFromGlobals):
    def reset(self, **options):
        return str(options)


def test_the_seed_reaches_every_kind_of_reset():
    one, equal, other = (reset_environment(DrawsFromGlobals(), seed) for seed in (3, 3, 4))
    assert one == equal != other
    assert reset_environment(TakesAnything(), 3) == "{'seed': 3}"
    assert reset_environment(TakesAnything(), None) == "{}"


def test_seeding_leaves_everybody_elses_generators_alone():
    random.seed(1), np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    reset_environment(DrawsFromGlobals(), 3)
    with pytest.raises(RuntimeError), OwnGenerators(5).installed():
        random.random()
        raise RuntimeError
    assert (random.random(), np.random.rand()) == expected


def test_own_generators_go_on_where_they_left_off():
    own = OwnGenerators(7)
    drawn = []
    for _ in range(3):
        random.random()
        with own.installed():
            drawn.append(random.random())
    expected = random.Random(7)
    assert drawn == [expected.random() for _ in range(3)]


ACTIONS = [
    *(
        "guess 5",
        "3",
        "take key",
        "go north",
        "go south",
        "open door",
        "leave",
        "right",
        "down",
        "1",
        "0",
        "2",
        "hit",
    ),
    *("[4]", "[7]", "stick", "", "no idea", "42", "pickup", "9" * 5000, "é漢", "[[", "take lamp"),
]
GAMES = [
    ("custom.envs.guess_number:GuessNumber", {"shaped": True}),
    ("custom.envs.simple_game:SimpleGameEnvironment", {}),
    ("custom.envs.text_adventure:TextAdventure", {}),
    ("custom.envs.tool_arithmetic:ToolArithmetic", {"attempts": 3}),
]


def play(env, seed, actions):
    transcript = [reset_environment(env, seed)]
    for action in actions:
        step = step_environment(env, action)
        transcript.append((step.observation, step.reward, step.done))
        if step.done:
            break
        # Draws of others meanwhile change nothing.
        random.random(), np.random.rand()
    return transcript


def equal_seeds_give_equal_episodes(name, kwargs):
    """Plays an environment with drawn seeds and actions; raises where equal ones differ."""
    one, other = make_environment(name, kwargs), make_environment(name, kwargs)

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(st.integers(0, 2**31 - 1), st.lists(st.sampled_from(ACTIONS), max_size=10))
    def check(seed, actions):
        first = play(one, seed, actions)
        assert first == play(other, seed, actions) == play(one, seed, actions)

    check()
    # The seed makes a difference.
    episodes = {
        str([play(one, seed, [move] * 3) for move in ("1", "[red]", "[1 2 3 4]")])
        for seed in range(20)
    }
    assert len(episodes) > 1
    one.close(), other.close()


def assert_threads_play_alike(name):
    """Plays 32 environments in eight threads; their episodes are those of one alone."""
    actions = ["1", "[right]", "right", "[up]", "5", "down"]
    alone = [play(make_environment(name), seed, actions) for seed in range(32)]
    envs = [make_environment(name) for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, envs, range(32), [actions] * 32)) == alone


@pytest.mark.parametrize(("name", "kwargs"), GAMES)
def test_equal_seeds_and_actions_give_equal_episodes_and_no_action_an_exception(name, kwargs):
    equal_seeds_give_equal_episodes(name, kwargs)


@pytest.mark.seconds
def test_episodes_in_many_threads_are_those_of_one():
    assert_threads_play_alike("custom.envs.guess_number:GuessNumber")


# The examples


def test_guess_number_answers_higher_and_lower_and_rewards_by_hand():
    env = GuessNumber(GuessNumberConfig(high=20, turns=3, shaped=True))
    assert reset_environment(env, 0) == "I think of a number from 1 to 20. You have 3 guesses."
    env.number = 10
    assert step_environment(env, "guess 4") == StepResult(
        "Higher. Guesses left: 2.", 0.1 * 0.7, False, {"won": False}
    )
    assert step_environment(env, "hm") == StepResult(
        "I see no number. Guesses left: 1.", 0.0, False, {"won": False}
    )
    assert step_environment(env, "20") == StepResult(
        "Lower. It was 10.", 0.05, True, {"won": False}
    )
    reset_environment(env, 0)
    env.number = 10
    assert step_environment(env, "10!") == StepResult("Correct!", 1.0, True, {"won": True})


def test_halving_always_finds_the_number():
    env = make_environment("custom.envs.guess_number:GuessNumber", {"high": 15})
    for seed in range(30):
        reset_environment(env, seed)
        low, high, reward = 1, 15, 0.0
        while reward == 0.0:
            guess = (low + high) // 2
            step = step_environment(env, f"guess {guess}")
            low, high = (guess + 1, high) if "Higher" in step.observation else (low, guess - 1)
            reward = step.reward
            assert reward or not step.done
        assert reward == 1.0


def test_the_text_adventure_can_always_be_won():
    env = TextAdventure()
    for seed in range(50):
        reset_environment(env, seed)

        def explore(came_from=None, env=env):
            total = step_environment(env, "take key").reward
            for way in list(env.exits[env.room]):
                if way != came_from:
                    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[way]
                    step_environment(env, f"go {way}")
                    total += explore(back)
                    step_environment(env, f"go {back}")
            return total

        assert explore() == 0.2
        assert step_environment(env, "Open door!") == StepResult(
            "The door opens. You are free!", 1.0, True, {}
        )


def test_the_simple_game_by_hand():
    env = SimpleGameEnvironment(EnvironmentConfig())
    start = reset_environment(env, 0)
    item = env.here[0]
    assert item in start and env.get_state_description() == "Score: 0.0, inventory: empty"
    assert step_environment(env, f"Take the {item}") == StepResult(
        f"You have the {item}.", 1.0, False, {}
    )
    assert step_environment(env, f"take {item}").reward == -0.1
    assert step_environment(env, "leave") == StepResult("You leave.", 0.0, True, {})
    assert env.get_state_description() == f"Score: 0.9, inventory: {item}"


def test_tool_arithmetic_knows_its_own_answer():
    env = ToolArithmetic(ToolArithmeticConfig(attempts=2))
    expression = reset_environment(env, 5).removeprefix("What is ").removesuffix("?")
    assert step_environment(env, "12").done is False
    assert step_environment(env, f"It is {eval(expression):,}.") == StepResult(
        "Correct.", 1.0, True, {}
    )


# From a name


def test_a_users_file_and_a_users_config_make_an_environment(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, size=1): self.size = size\n"
        "    def reset(self): return 'x' * self.size\n"
        "    def step(self, action): return '', 1.0, True, {}\n"
    )
    assert reset_environment(make_environment(f"{file}:Mine", {"size": 3}), 0) == "xxx"

    @dataclass
    class Wide(GuessNumberConfig):
        high: int = 99

    assert make_environment(lambda high: GuessNumber(Wide(high)), {"high": 3}).config.high == 3
    with pytest.raises(ValueError, match="<lambda> makes a int without reset and step"):
        make_environment(lambda size: size, {"size": 3})
    assert "1 to 99" in reset_environment(GuessNumber(Wide()), 0)


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        ("FrozenLake-v1", {}, "'FrozenLake-v1' is unknown; allowed: .*PACKAGE.MODULE:CLASS"),
        ("no.such.module:Env", {}, "there is no module 'no'"),
        ("custom.envs.guess_number:Nothing", {}, "does not define 'Nothing'"),
        (
            "custom.envs.guess_number:GuessNumber",
            {"hihg": 3},
            r"takes \(high: int = 10, .*, not \['hihg'\]",
        ),
        (3, {}, "not from a int"),
    ],
)
def test_what_cannot_be_made_says_why(source, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_environment(source, kwargs)


def test_an_environments_process_needs_neither_torch_nor_the_libraries_of_others():
    code = (
        "import sys\n"
        "from custom.agent import AgentSpec\n"
        "AgentSpec('custom.envs.guess_number:GuessNumber').build().reset(0)\n"
        "heavy = 'torch', 'transformers', 'gymnasium', 'textarena'\n"
        "heavy += 'reasoning_gym', 'ray', 'vllm'\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Trajectories


def test_a_trajectory_has_one_more_state_than_actions():
    trajectory = Trajectory(states=["s0"])
    trajectory.record("a0", StepResult("s1", 0.25, False, {}))
    trajectory.record("a1", StepResult("s2", 1.0, True, {"x": 1}))
    trajectory.ending = "done"
    assert (trajectory.states, trajectory.actions) == (["s0", "s1", "s2"], ["a0", "a1"])
    assert (trajectory.rewards, trajectory.dones, trajectory.infos) == (
        [0.25, 1.0],
        [False, True],
        [{}, {"x": 1}],
    )
    assert (len(trajectory), len(Trajectory())) == (2, 0)
