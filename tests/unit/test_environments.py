"""Environments: the boundary at which they are called, the examples, the adapters."""

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
from features.adapters.gymnasium_spaces import space_to_text
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
    ("gymnasium:FrozenLake-v1", {}),
    ("gymnasium:Taxi-v4", {}),
    ("gymnasium:Blackjack-v1", {}),
    ("gymnasium:CliffWalking-v1", {"is_slippery": True}),
    ("gymnasium:CartPole-v1", {"action_names": ["left", "right"]}),
    ("reasoning_gym:chain_sum", {}),
    ("reasoning_gym:leg_counting", {}),
    ("reasoning_gym:word_sorting", {}),
    ("textarena:GuessTheNumber-v0", {"invalid_reward": None}),
    ("textarena:Bandit-v0", {}),
    ("textarena:FrozenLake-v0-random", {}),
    ("textarena:Mastermind-v0", {}),
    ("textarena:ThreeCardMonte-v0", {}),
    ("textarena:2048-v0-3x3", {}),
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


@pytest.mark.parametrize(("name", "kwargs"), GAMES)
def test_equal_seeds_and_actions_give_equal_episodes_and_no_action_an_exception(name, kwargs):
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


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name", ["textarena:GuessTheNumber-v0", "textarena:2048-v0-3x3", "gymnasium:FrozenLake-v1"]
)
def test_episodes_in_many_threads_are_those_of_one(name):
    actions = ["1", "[right]", "right", "[up]", "5", "down"]
    alone = [play(make_environment(name), seed, actions) for seed in range(32)]
    envs = [make_environment(name) for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(play, envs, range(32), [actions] * 32)) == alone


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
        ("FrozenLake-v1", {}, "'FrozenLake-v1' is unknown; allowed: gymnasium:…"),
        ("no.such.module:Env", {}, "there is no module 'no'"),
        ("custom.envs.guess_number:Nothing", {}, "does not define 'Nothing'"),
        (
            "custom.envs.guess_number:GuessNumber",
            {"hihg": 3},
            r"takes \(high: int = 10, .*, not \['hihg'\]",
        ),
        ("gymnasium:Nothing-v1", {}, "gymnasium:Nothing-v1 cannot be made"),
        ("gymnasium:Taxi-v3", {}, "use `Taxi-v4` instead"),
        ("gymnasium:Pendulum-v1", {}, "action space Box.*allowed: Discrete or Text"),
        ("gymnasium:FrozenLake-v1", {"nothing": 1}, "cannot be made with"),
        ("gymnasium:FrozenLake-v1", {"action_names": ["a"] * 4}, "allowed: different names"),
        (
            "gymnasium:FrozenLake-v1",
            {"action_names": list("abcde")},
            "one for each of the numbers 0 to 3",
        ),
        ("reasoning_gym:nothing", {}, "'nothing' not registered"),
        ("reasoning_gym:chain_sum", {"nothing": 1}, "unexpected keyword argument 'nothing'"),
        ("textarena:Nothing-v0", {}, "Nothing-v0 not found"),
        ("textarena:TicTacToe-v0", {}, "is a game of 2, given opponent=None"),
        (3, {}, "not from a int"),
    ],
)
def test_what_cannot_be_made_says_why(source, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_environment(source, kwargs)


def test_a_game_whose_word_list_is_not_there_says_so(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *names, **options: False)
    monkeypatch.setattr(nltk.data, "path", [])
    for name in [name for name in sys.modules if name.startswith("textarena.envs.Hangman")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"textarena:Hangman-v0 cannot be made with .*NLTK"):
        make_environment("textarena:Hangman-v0")


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


# gymnasium


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("right", 2),
        ("2", 2),
        ("I go RIGHT.", 2),
        ("not left, I go right", 2),
        ("<answer>up</answer>", 3),
        ("Action: 1.", 1),
        ("down/left", 0),
        ("", None),
        ("upright", None),
        ("1.5", None),
        ("-1", None),
        ("17", None),
        ("up-to-date", None),
    ],
)
def test_the_last_action_that_a_text_names_counts(text, number):
    assert make_environment("gymnasium:FrozenLake-v1").read_action(text) == number


def test_frozen_lake_reads_as_a_map_and_is_won_by_name():
    env = make_environment(
        "gymnasium:FrozenLake-v1", {"is_slippery": False, "invalid_reward": -0.5}
    )
    start = reset_environment(env, 0)
    assert "[S] F  F  F\n F  H  F  H\n F  F  F  H\n H  F  F  G\n" in start
    assert "0 (left), 1 (down), 2 (right), 3 (up)" in start
    invalid = step_environment(env, "jump")
    assert (
        invalid.observation.startswith("I found no action in your answer.")
        and invalid.reward == -0.5
    )
    assert "\x1b" not in step_environment(env, "down").observation
    rewards = [
        step_environment(env, action).reward for action in ("down", "right", "right", "1", "2")
    ]
    assert rewards == [0, 0, 0, 0, 1]
    assert step_environment(env, "left") == StepResult(
        "The game is over.", 0.0, True, {"valid": False}
    )


def test_a_template_of_ones_own_is_filled_and_a_wrong_field_is_named():
    kwargs = {
        "prompt_template": "{name}|{goal}|{actions}|{{}}",
        "goal": "Win.",
        "action_names": ["stay"],
    }
    assert reset_environment(make_environment("gymnasium:Blackjack-v1", kwargs), 0) == (
        "Blackjack-v1|Win.|0 (stay), 1|{}"
    )
    env = make_environment("gymnasium:Blackjack-v1", {"prompt_template": "{observatoin}"})
    with pytest.raises(KeyError, match="observatoin"):
        reset_environment(env, 0)


def test_blackjacks_tuple_is_named():
    assert "your sum: 7, the dealer's card: 10, usable ace: 0" in reset_environment(
        make_environment("gymnasium:Blackjack-v1"), 3
    )


def test_spaces_become_text_and_images_are_refused():
    from gymnasium import spaces

    nested = spaces.Dict(
        {"at": spaces.Tuple([spaces.Discrete(3), spaces.Text(5)]), "v": spaces.Box(-1, 1, (2,))}
    )
    value = {"at": (1, "ab"), "v": np.array([0.5, -0.12345])}
    assert space_to_text(nested, value) == "at: 1, ab\nv: [0.5, -0.1235]"
    with pytest.raises(ValueError, match="cannot be written down; allowed: Discrete, Text"):
        space_to_text(spaces.Box(0, 255, (64, 64, 3)), None)


def test_gymnasium_takes_text_actions():
    import gymnasium

    class Echo(gymnasium.Env):
        action_space = gymnasium.spaces.Text(4)
        observation_space = gymnasium.spaces.Text(20)

        def reset(self, seed=None, options=None):
            return "Say yes.", {}

        def step(self, action):
            return action, float(action == "yes"), True, False, {}

    gymnasium.register("Echo-v0", Echo)
    env = make_environment("gymnasium:Echo-v0")
    assert (
        reset_environment(env, 0)
        == "Play Echo-v0.\n\nSay yes.\n\nActions: any text. Answer with one of them."
    )
    assert step_environment(env, "é").observation.startswith("I found no action")
    assert step_environment(env, " yes\n").reward == 1.0


# reasoning-gym and textarena


@pytest.mark.seconds
def test_a_reasoning_gym_task_is_scored_by_its_verifier():
    env = make_environment("reasoning_gym:chain_sum", {"prompt_template": "Q: {question}"})
    assert reset_environment(env, 1).startswith("Q: State the final answer")
    assert step_environment(env, "no idea") == StepResult(
        "That is not right.", 0.0, True, {"score": 0.0}
    )
    reset_environment(env, 1)
    told = step_environment(env, f"So it is {env.entry['answer']}.")
    assert told == StepResult("Correct.", 1.0, True, {"score": 1.0})


def test_guess_the_number_is_won_by_halving_with_or_without_brackets():
    env = make_environment("textarena:GuessTheNumber-v0", {"max_number": 10})
    for seed in range(10):
        assert "between 1 and 10" in reset_environment(env, seed)
        low, high, step = 1, 10, None
        while step is None or not step.done:
            guess = (low + high) // 2
            step = step_environment(env, f"I say [{guess}]" if seed % 2 else str(guess))
            low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
            # The player's words do not come back.
            assert str(guess) not in step.observation
        assert step.reward == 1 and "Congratulations" in step.observation


def test_an_invalid_textarena_move_is_told_and_the_second_ends_the_game():
    env = make_environment("textarena:GuessTheNumber-v0", {"invalid_reward": -1.0})
    reset_environment(env, 0)
    step_environment(env, "10")
    told = step_environment(env, "[what]")
    assert "invalid move" in told.observation and not told.done
    ended = step_environment(env, "[what]")
    assert ended.done and ended.reward == -1.0 and ended.info["valid"] is False
    reset_environment(env, 0)
    unreadable = step_environment(env, "[" + "9" * 5000 + "]")
    assert unreadable.observation == "The game cannot read that move." and not unreadable.done


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
