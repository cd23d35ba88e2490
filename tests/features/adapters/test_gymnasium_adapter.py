"""Tests how gymnasium's games are told: a person, or a model, can play them from the text alone."""

import random
import re
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from custom.env_calls import reset_environment, step_environment
from custom.env_factory import make_environment
from features.adapters.gymnasium import worst_reward
from features.adapters.gymnasium_minigrid import COLOURS, DOORS, OBJECTS, draw_image
from features.adapters.gymnasium_spaces import space_to_text


def texts_of_states(env):
    """Writes every state, as a step would that led there."""
    env.reset(0)
    told = {}
    for state in range(env.game.observation_space.n):
        env.game.unwrapped.s = state
        told[state] = env._show(state)
    return told


# What is told


def test_all_500_taxi_states_are_readable_and_differ():
    env = make_environment("gymnasium:Taxi-v4")
    told = texts_of_states(env)
    assert len(set(told.values())) == 500
    # The picture alone tells them apart, too.
    assert len({text.partition("\n")[2] for text in told.values()}) == 500
    for state, text in told.items():
        row, column, passenger, destination = env.game.unwrapped.decode(state)
        words, *picture = text.split("\n")
        assert {len(line) for line in picture} == {26}
        signs = {
            (y, x): line[1 + 5 * x : 5 + 5 * x].strip()
            for y, line in enumerate(picture[1:-1])
            for x in range(5)
        }
        # By hand: the stops' places, and a T, a P and a D each exactly once.
        stops = {"R": (0, 0), "G": (0, 4), "Y": (4, 0), "B": (4, 3)}
        assert [at for at, sign in signs.items() if "T" in sign] == [(row, column)]
        assert [at for at, sign in signs.items() if "D" in sign] == [stops["RGYB"[destination]]]
        riding = passenger == 4
        expected = (row, column) if riding else stops["RGYB"[passenger]]
        assert [at for at, sign in signs.items() if "P" in sign] == [expected]
        assert signs[row, column].endswith("TP") == riding
        assert all(letter in signs[at] for letter, at in stops.items())
        assert f"taxi is at row {row}, column {column}." in words
        assert ("in the taxi" if riding else f"passenger is at {'RGYB'[passenger]} ") in words
        assert f"destination is {'RGYB'[destination]} (row" in words


def test_taxis_walls_stop_the_taxi_where_the_picture_shows_them():
    env = make_environment("gymnasium:Taxi-v4")
    for state, text in texts_of_states(env).items():
        row, column, *_ = env.game.unwrapped.decode(state)
        line = text.split("\n")[2 + row]
        stays = env.game.unwrapped.P[state][2][0][1] == state
        assert (line[5 * (column + 1)] == "|") == stays


@pytest.mark.parametrize(
    ("name", "columns", "kwargs"),
    [
        ("FrozenLake-v1", 4, {}),
        ("FrozenLake8x8-v1", 8, {}),
        ("FrozenLake-v1", 3, {"desc": ["SFH", "FFG"]}),
        ("CliffWalking-v1", 12, {}),
    ],
)
def test_every_cell_of_a_map_is_readable(name, columns, kwargs):
    env = make_environment(f"gymnasium:{name}", kwargs)
    told = texts_of_states(env)
    assert len(set(told.values())) == len(told) == env.game.observation_space.n
    maps = set()
    for state, text in told.items():
        words, *lines = text.split("\n")
        row, column = divmod(state, columns)
        assert words.startswith(f"You are at row {row}, column {column}, on ")
        cells = [re.findall("...", line.ljust(3 * columns)) for line in lines]
        assert [(y, x) for y, r in enumerate(cells) for x, cell in enumerate(r) if "[" in cell] == [
            (row, column)
        ]
        maps.add(re.sub(r"[][ ]", "", "\n".join(lines)))
    # Below the player the map is the same.
    assert len(maps) == 1 and ("G" in maps.pop()) == name.startswith("Frozen")


@pytest.mark.parametrize(
    ("name", "kwargs", "told", "untold"),
    [
        ("FrozenLake-v1", {}, "only one time in three", ""),
        (
            "FrozenLake-v1",
            {"is_slippery": False},
            "reaching G pays 1, falling into H 0",
            "slippery",
        ),
        ("FrozenLake-v1", {"success_rate": 0.8}, "80% of the time", "one time in three"),
        (
            "FrozenLake-v1",
            {"reward_schedule": (5, -2, -1)},
            "G pays 5, falling into H -2, any other move -1",
            "",
        ),
        ("FrozenLake-v1", {"max_episode_steps": 7}, "after 7 actions at the latest", ""),
        ("CliffWalking-v1", {}, "A step onto C pays -100", "slippery"),
        ("CliffWalkingSlippery-v1", {}, "only one time in three", ""),
        ("Taxi-v4", {}, "delivering the passenger pays 20", "rains"),
        ("Taxi-v4", {"is_rainy": True}, "80% of moves go where you steer", "may change"),
        (
            "Taxi-v4",
            {"fickle_passenger": True},
            "The passenger may change the destination",
            "rains",
        ),
        ("Blackjack-v1", {}, "A win pays 1, a loss -1, a draw 0", "1.5"),
        ("Blackjack-v1", {"sab": False, "natural": True}, "pays 1.5", ""),
        ("CartPole-v1", {}, "the goal is to balance the pole", "ndarray"),
        (
            "MountainCar-v0",
            {},
            "the agent is penalised with a reward of -1 for each timestep",
            "Thesis",
        ),
    ],
)
def test_the_prompt_tells_this_games_rules_and_is_short(name, kwargs, told, untold):
    prompt = reset_environment(make_environment(f"gymnasium:{name}", kwargs), 0)
    assert told in prompt and len(prompt) < (1200 if name == "CartPole-v1" else 1000)
    assert not untold or untold not in prompt


class Valley(gymnasium.Env):
    """Rolls a ball.

    ## Description
    A ball lies in a valley. Its `goal` is the **hill**, see [here](https://nowhere.org).
    Roll it [up](x).

    It was first described elsewhere.

    ## Action Space
    - 0: Push it to the left
    - 1: Push it to the right.

    ## Observation Space
    | Num | Observation | Min |
    |-----|-------------|-----|
    | 0   | `Position`  | -1  |
    | 1   | Speed       | -1  |

    ## Rewards
    Each push pays -0.5.
    """

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return [0.123456, -0.0], {}

    def step(self, action):
        return [1.0, 12.345], -0.5, False, False, {}


gymnasium.register("Valley-v0", Valley, max_episode_steps=5)


def test_a_docstring_tells_what_no_legend_does():
    env = make_environment("gymnasium:Valley-v0")
    assert reset_environment(env, 0) == (
        "Play Valley-v0. A ball lies in a valley. Its goal is the hill, see here. Roll it up.\n"
        "Each push pays -0.5. The game ends after 5 actions at the latest.\n\n"
        "position: 0.1235, speed: 0\n\n"
        "Actions: 0 (push it to the left), 1 (push it to the right). Answer with one of them."
    )
    assert [env.read_action(text) for text in ("I push it to the right", "left!", "1")] == [
        1,
        None,
        1,
    ]
    assert step_environment(env, "1").observation == "position: 1, speed: 12.35"


class Painted(gymnasium.Env):
    """Shows the player by a colour alone."""

    metadata: ClassVar = {"render_modes": ["ansi"]}
    action_space = observation_space = spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}

    def render(self):
        return "\x1b[2K|.\x1b[41mo\x1b[0m.|\n|..\x1b[0m.|"


gymnasium.register("Painted-v0", Painted, max_episode_steps=5)


def test_what_is_painted_stands_in_brackets():
    assert "|.[o].|\n|...|" in reset_environment(make_environment("gymnasium:Painted-v0"), 0)


def test_names_of_observations_reach_rows_of_numbers_and_tuples():
    env = make_environment("gymnasium:MountainCar-v0", {"observation_names": ["x", "v"]})
    assert re.search(r"\nx: -0\.\d{1,4}, v: 0\n", reset_environment(env, 0))
    pair = spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])
    assert space_to_text(pair, (1, [0, 1]), ["a"]) == "a: 1, [0, 1]"
    assert (
        space_to_text(spaces.Box(-9, 9, (3,)), [0.5, -0.00001, 7.126], ["a", "b"])
        == "a: 0.5, b: 0, 7.13"
    )


# What an unreadable answer costs


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("FrozenLake-v1", {}, 0.0),
        ("FrozenLake-v1", {"reward_schedule": (1, -3, 0)}, -3.0),
        ("Taxi-v4", {}, -10.0),
        ("CliffWalking-v1", {}, -100.0),
        ("Blackjack-v1", {}, -1.0),
        ("CartPole-v1", {}, 0.0),
        ("CartPole-v1", {"sutton_barto_reward": True}, -1.0),
        ("MountainCar-v0", {}, -1.0),
        ("Acrobot-v1", {}, -1.0),
        ("Valley-v0", {}, -0.5),
        ("Taxi-v4", {"invalid_reward": -0.25}, -0.25),
        ("MountainCar-v0", {"invalid_reward": 0.0}, 0.0),
    ],
)
def test_an_unreadable_answer_costs_the_worst_that_a_step_can_pay_and_moves_nothing(
    name, kwargs, expected
):
    env, other = (make_environment(f"gymnasium:{name}", kwargs) for _ in range(2))
    assert reset_environment(env, 5) == reset_environment(other, 5)
    steps = [step_environment(env, text) for text in ("hm", "17", "")]
    assert {step.reward for step in steps} == {expected}
    assert all(
        f"The actions are: {env._action_list()}" in s.observation and not s.info["valid"]
        for s in steps
    )
    # The trial that found the reward out has left no trace: the episode goes on as one without it.
    for _ in range(3):
        assert step_environment(env, "1") == step_environment(other, "1")


class HiddenSide(gymnasium.Env):
    """Draws a side for each step; the other one costs 1."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Discrete(1)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.side = self.np_random.integers(2)
        return 0, {}

    def step(self, action):
        reward = -float(action != self.side)
        self.side = self.np_random.integers(2)
        return 0, reward, False, False, {}


def test_the_trial_of_a_game_does_not_know_what_the_game_drew():
    gymnasium.register("HiddenSide-v0", HiddenSide)
    assert worst_reward(gymnasium.make("HiddenSide-v0"), "HiddenSide-v0", {}) == -1.0


def test_a_game_that_cannot_be_tried_costs_1(monkeypatch):
    game = gymnasium.make("Valley-v0")
    monkeypatch.setattr(Valley, "step", lambda self, action: 1 / 0)
    assert worst_reward(game, "Valley-v0", {}) == -1.0


def test_a_slow_games_trial_ends_in_time(monkeypatch):
    import time

    clock = iter(range(1000))
    monkeypatch.setattr(time, "thread_time", lambda: next(clock) * 0.1)
    played = []
    monkeypatch.setattr(
        Valley, "step", lambda self, a: (played.append(a), ([0.0, 0.0], -2.0, False, False, {}))[1]
    )
    assert worst_reward(gymnasium.make("Valley-v0"), "Valley-v0", {}) == -2.0 and len(played) == 1


# The optional members


@pytest.mark.parametrize(
    "name", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1", "Valley-v0"]
)
def test_sampled_actions_are_readable_names_and_cover_the_game(name):
    env = make_environment(f"gymnasium:{name}")
    sampled = [env.sample_action(random.Random(seed)) for seed in range(60)]
    assert sampled == [env.sample_action(random.Random(seed)) for seed in range(60)]
    assert {env.read_action(action) for action in sampled} == set(range(env.game.action_space.n))
    assert not any(action.isdigit() for action in sampled)


def test_sampled_numbers_and_texts_are_valid_actions_and_leave_the_episode_alone():
    env = make_environment("gymnasium:Blackjack-v1", {"action_names": ["stay"]})
    assert {env.sample_action(random.Random(seed)) for seed in range(20)} == {"stay", "1"}
    one, other = (make_environment("gymnasium:FrozenLake-v1") for _ in range(2))
    one.reset(0), other.reset(0)
    for seed in range(5):
        action = one.sample_action(random.Random(seed))
        assert one.step(action) == other.step(action)


def test_the_most_turns_are_the_games_own_time_limit():
    limits = {
        "FrozenLake-v1": 100,
        "FrozenLake8x8-v1": 200,
        "CliffWalking-v1": None,
        "CartPole-v1": 500,
    }
    assert {name: make_environment(f"gymnasium:{name}").max_turns for name in limits} == limits
    assert make_environment("gymnasium:CartPole-v1", {"max_episode_steps": 9}).max_turns == 9


# Grids


def test_a_grid_of_numbers_is_written_row_by_row() -> None:
    plain = spaces.Box(0, 9, (8, 9), np.int64)
    value = np.arange(72).reshape(8, 9) % 10
    rows = space_to_text(plain, value).splitlines()
    assert rows[0] == "0 1 2 3 4 5 6 7 8" and rows[7] == "3 4 5 6 7 8 9 0 1" and len(rows) == 8
    channels = spaces.Box(0, 255, (7, 7, 3), np.uint8)
    value = np.zeros((7, 7, 3), np.uint8)
    value[0, 1] = (2, 5, 0)
    assert space_to_text(channels, value).splitlines()[0] == "0/0/0 2/5/0" + " 0/0/0" * 5
    assert len(space_to_text(spaces.MultiBinary((10, 10)), np.ones((10, 10))).splitlines()) == 10
    for space in (spaces.Box(0, 255, (64, 64, 3), np.uint8), spaces.Box(0, 255, (128,), np.uint8)):
        with pytest.raises(ValueError, match=r"up to 64 numbers, and grids of up to 1024"):
            space_to_text(space, space.sample())


def test_minigrids_view_is_told_by_name() -> None:
    image = np.zeros((3, 3, 3), np.uint8)  # columns, rows
    image[:, 0] = (2, 5, 0)
    image[1, 1], image[2, 1], image[0, 2] = (1, 0, 0), (4, 4, 2), (8, 1, 0)
    image[1, 2] = (5, 0, 0)  # what the player carries
    assert draw_image(image).splitlines()[1:] == [
        "# # #",
        "? . D",
        "G @ ?",
        "locked yellow door: 1 ahead, 1 right",
        "green goal: 1 left",
        "You carry: red key.",
    ]
    image[1, 2] = (1, 0, 0)
    assert draw_image(image).endswith("You carry nothing.")


def test_minigrid_plays() -> None:
    constants = pytest.importorskip("minigrid.core.constants")
    assert tuple(constants.IDX_TO_OBJECT[i] for i in range(len(OBJECTS))) == OBJECTS
    assert tuple(constants.IDX_TO_COLOR[i] for i in range(len(COLOURS))) == COLOURS
    assert {name: i for i, name in enumerate(DOORS)} == constants.STATE_TO_IDX
    env = make_environment("gymnasium:minigrid:MiniGrid-DoorKey-5x5-v0")
    first = reset_environment(env, 0)
    assert "use the key to open the door" in first and "yellow key: 1 right" in first
    assert env.max_turns == 250
    # Turn, and the key is ahead; take it.
    assert "yellow key: 1 ahead" in step_environment(env, "right").observation
    assert "You carry: yellow key." in step_environment(env, "pickup").observation
