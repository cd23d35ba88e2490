"""Environments of gymnasium, reasoning-gym and textarena, as their adapters play them."""

import sys

import numpy as np
import pytest

from custom.agent import AgentSpec
from custom.env import StepResult
from custom.env_calls import reset_environment, step_environment
from custom.env_dataset import CustomEnvDataset
from custom.env_factory import make_environment
from features.adapters.gymnasium_spaces import space_to_text
from tests.unit.config.helpers import checked
from tests.unit.test_environments import assert_threads_play_alike, equal_seeds_give_equal_episodes
from training.config import AgentConfig, EnvironmentChoice, PPOConfig

GAMES = [
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


@pytest.mark.parametrize(("name", "kwargs"), GAMES)
def test_equal_seeds_and_actions_give_equal_episodes_and_no_action_an_exception(name, kwargs):
    equal_seeds_give_equal_episodes(name, kwargs)


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name", ["textarena:GuessTheNumber-v0", "textarena:2048-v0-3x3", "gymnasium:FrozenLake-v1"]
)
def test_episodes_in_many_threads_are_those_of_one(name):
    assert_threads_play_alike(name)


def test_a_game_whose_word_list_is_not_there_says_so(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda *names, **options: False)
    monkeypatch.setattr(nltk.data, "path", [])
    for name in [name for name in sys.modules if name.startswith("textarena.envs.Hangman")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"textarena:Hangman-v0 cannot be made with .*NLTK"):
        make_environment("textarena:Hangman-v0")


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


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        ("FrozenLake-v1", {}, "'FrozenLake-v1' is unknown; allowed: gymnasium:…"),
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
    ],
)
def test_what_cannot_be_made_says_why(source, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_environment(source, kwargs)


def test_a_library_that_is_named_as_such_is_loaded_ahead():
    sources = ["textarena:Hangman-v0", "/a/gymnasium.py:Z"]
    assert [AgentSpec(source).libraries for source in sources] == [("textarena",), ()]


def test_a_file_that_names_a_game_without_its_library_is_told_the_libraries(tmp_path):
    file = tmp_path / "task.json"
    file.write_text('{"environment": "FrozenLake"}')
    with pytest.raises(ValueError, match="'FrozenLake' is unknown; allowed: gymnasium:…"):
        CustomEnvDataset(data_files=[str(file)])


@pytest.mark.seconds
def test_an_adapter_fills_the_specs_template_with_its_own_fields():
    spec = AgentSpec(
        "reasoning_gym:chain_sum", {"max_terms": 2}, prompt_template="{name}: {question}"
    )
    assert spec.build().reset(1)[0]["content"].startswith("chain_sum: State")


def test_the_library_of_a_name_that_is_nearly_its_is_offered(runnable):
    (problem,) = checked(runnable, "agent.environment.name=gym:FrozenLake-v1")
    assert problem.endswith("there is no gym. Did you mean 'gymnasium:FrozenLake-v1'?")


def home(name, **settings):
    own = EnvironmentChoice(name=name, **settings)
    made = PPOConfig(agent=AgentConfig(environment=own)).environment_home
    return made.isolation, made.network, made.memory_gb


def test_libraries_that_run_texts_live_in_processes_without_network_by_default():
    assert home("reasoning_gym:chain_sum") == ("process", False, 4.0)
    assert home("textarena:Sokoban-v0") == ("process", False, 4.0)
    assert home("verifiers:mine") == ("process", True, 4.0)
    assert home("gymnasium:Taxi-v4") == ("thread", True, None)
    assert home("textarena:Sokoban-v0", isolation="thread", network=True, memory_gb=1.0) == (
        "thread",
        True,
        1.0,
    )
