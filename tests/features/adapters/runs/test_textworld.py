"""Tests TextWorld's games, generated and from files."""

import math
import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from custom.env_calls import reset_environment, step_environment
from custom.env_factory import make_environment
from tests.features.adapters.test_reasoning_gym import ODD_TEXTS

pytest.importorskip("textworld")
# The interpreter knows scores of famous games only; TextWorld's games bring their own.
pytestmark = pytest.mark.filterwarnings("ignore:.*is not fully supported")
COINS = "textworld:tw-coin_collector"


def test_a_won_game_pays_one_and_is_over():
    env = make_environment(COINS)
    first = reset_environment(env, 5)
    assert "take the coin" in first or "coin" in first
    assert "$$" not in first
    total, generator = 0.0, random.Random(0)
    for _ in range(50):
        step = step_environment(env, f"I think.\n> {env.sample_action(generator)}")
        total += step.reward
        if step.done:
            break
    assert (total, step.info["won"]) == (1.0, True)
    assert step_environment(env, "look").observation == "The game is over."
    env.close()


def test_the_step_limit_ends_the_episode_and_is_the_most_turns():
    env = make_environment(COINS, {"max_episode_steps": 3})
    assert env.max_turns == 3
    reset_environment(env, 5)
    assert [step_environment(env, "look").done for _ in range(3)] == [False, False, True]
    assert make_environment(COINS, {"max_episode_steps": None}).max_turns is None
    env.close()


def test_no_text_raises_and_what_the_game_does_not_understand_it_answers():
    env = make_environment(COINS, {"max_episode_steps": 1000})
    reset_environment(env, 5)
    for text in ODD_TEXTS:
        step = step_environment(env, text)
        assert math.isfinite(step.reward) and not step.done and not step.info["won"]
    step = step_environment(env, "frobnicate")
    assert "not a verb I recognise" in step.observation and step.reward == 0.0
    for command in ("save", "quit", "look. quit", "restart", "tw-print state"):
        assert step_environment(env, command).observation == "That command is not available."
    assert "-=" in step_environment(env, "look").observation
    env.close()


@pytest.mark.slow
def test_equal_seeds_give_equal_games_in_two_threads_while_others_draw():
    stop = threading.Event()

    def draw():
        while not stop.wait(1e-4):
            random.random(), np.random.rand()

    def games(_):
        env = make_environment(COINS)
        first = [reset_environment(env, seed) for seed in range(6)]
        env.close()
        return first

    with ThreadPoolExecutor(3) as pool:
        pool.submit(draw)
        one, other = pool.map(games, range(2))
        stop.set()
    assert one == other and len(set(one)) > 3


def test_a_game_file_is_played(tmp_path):
    made = make_environment(COINS)
    wanted = reset_environment(made, 5)
    for ending in ("z8", "json"):
        shutil.copy(Path(made.folder.name) / f"game.{ending}", tmp_path / f"mine.{ending}")
    env = make_environment(f"textworld:{tmp_path}/mine.z8")
    assert reset_environment(env, 0) == wanted == reset_environment(env, 1)
    env.close(), made.close()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("tw-nothing", {}, "neither a file nor a generator: tw-simple"),
        ("tw-coin_collector", {"levle": 1}, r"takes no \['levle'\]; allowed: level"),
        ("tw-coin_collector", {"level": 0}, "cannot be made with .*level"),
    ],
)
def test_what_cannot_be_played_says_why(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_environment(f"textworld:{name}", kwargs)
