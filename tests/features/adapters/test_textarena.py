"""Tests textarena's games for two: opponents, rewards; and what sample_action draws."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from custom.env import BadEnvironment
from custom.env_calls import reset_environment, step_environment
from custom.env_factory import make_environment
from data.seeds import seed_beside
from features.adapters.textarena import unwrapped
from features.adapters.textarena_opponents import draw_moves
from tests.features.adapters.test_reasoning_gym import ODD_TEXTS

OPPONENT = '''
FIRST = {"calls": 0}

def lowest(observation):
    """Plays the lowest free cell."""
    FIRST["calls"] += 1
    return "[" + observation.rpartition("Available Moves: '[")[2][0] + "]"

def silent(observation):
    return None

def babbles(observation):
    return "well"

class Remembers:
    def __init__(self, seed):
        self.heard, self.first = [], f"[{seed}]"

    def __call__(self, observation):
        self.heard.append(observation)
        return self.first if len(self.heard) == 1 else lowest(observation)
'''


@pytest.fixture
def opponent(tmp_path):
    file = tmp_path / "opponent.py"
    file.write_text(OPPONENT)
    return lambda name: f"{file}:{name}"


def play(env, seed, moves):
    return [reset_environment(env, seed), *(step_environment(env, move) for move in moves)]


# Two players


def test_a_function_answers_each_move_and_a_won_game_pays_one(opponent):
    env = make_environment("textarena:TicTacToe-v0", {"opponent": opponent("lowest")})
    first, *steps = play(env, 0, ["[4]", "I take [8]", "[6]", "[2]"])
    assert "You are Player 0" in first
    # The opponent takes 0, then 1, then 2; its words are shown, the player's own are not.
    assert "[Player 1] [0]" in steps[0].observation and "I take" not in steps[1].observation
    assert [(step.reward, step.done) for step in steps[:2]] == [(0.0, False), (0.0, False)]
    assert (steps[2].reward, steps[2].done) == (-1.0, True) and "Player 1 has won" in steps[
        2
    ].observation
    assert steps[3].observation == "The game is over."
    steps = play(env, 0, ["[2]", "[4]", "[6]"])[1:]
    assert (steps[-1].reward, steps[-1].done, steps[-1].info["valid"]) == (1.0, True, True)


def test_a_class_is_built_from_a_seed_of_the_episodes_that_is_not_the_games(opponent):
    env = make_environment("textarena:TicTacToe-v0", {"opponent": opponent("Remembers")})
    said = {seed: play(env, seed, ["[4]"])[1].observation for seed in (7, 8)}
    for seed, words in said.items():
        assert f"[Player 1] [{seed_beside(seed, 'opponent')}]" in words
        assert f"[Player 1] [{seed}]" not in words
        assert play(env, seed, ["[4]"])[1].observation == words


def test_a_random_opponent_draws_other_numbers_than_the_game():
    env = make_environment("textarena:TicTacToe-v0", {"opponent": "random"})
    drawn = {}
    env._draw_move = lambda player, generator: drawn.setdefault(player, generator.random())
    env.opponent = None
    reset_environment(env, 7)
    env.opponent("")
    [number] = drawn.values()
    assert number != random.Random(7).random()


def test_an_invalid_or_unreadable_move_never_pays_more_than_losing():
    for invalid_reward in (0.0, None, 0.5):
        kwargs = {"opponent": "random", "invalid_reward": invalid_reward}
        env = make_environment("textarena:TicTacToe-v0", kwargs)
        for text in ("[9]", "[" + "9" * 5000 + "]"):
            _, once, twice = play(env, 0, [text, text])
            assert (once.reward, once.done, once.info["valid"]) == (0.0, False, False)
            assert (twice.reward, twice.done, twice.info["valid"]) == (-1.0, True, False)
    env = make_environment("textarena:TicTacToe-v0", {"opponent": "random", "invalid_reward": -2.0})
    assert play(env, 0, ["no", "no"])[-1].reward == -2.0


def test_an_opponent_without_valid_moves_loses(opponent):
    env = make_environment("textarena:TicTacToe-v0", {"opponent": opponent("babbles")})
    _, step = play(env, 0, ["[4]"])
    assert (step.reward, step.done) == (1.0, True)
    env = make_environment("textarena:TicTacToe-v0", {"opponent": opponent("silent")})
    reset_environment(env, 0)
    with pytest.raises(BadEnvironment, match=r"silent' returned None .*allowed: a string"):
        step_environment(env, "[4]")


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name",
    [
        "TicTacToe-v0",
        "ConnectFour-v0",
        "Nim-v0",
        "KuhnPoker-v0",
        "Othello-v0-small",
        "IteratedPrisonersDilemma-v0",
    ],
)
def test_games_of_two_end_against_random_moves_and_equal_seeds_are_equal_games(name):
    def game(seed):
        env, generator = (
            make_environment(f"textarena:{name}", {"opponent": "random"}),
            random.Random(0),
        )
        transcript = [reset_environment(env, seed)]
        for _ in range(100):
            step = step_environment(env, env.sample_action(generator) or "[0]")
            transcript.append((step.observation, step.reward))
            if step.done:
                break
        assert step.done and step.reward in (-1, 0, 1)
        return transcript

    assert [game(seed) for seed in range(3)] == [game(seed) for seed in range(3)]


@pytest.mark.seconds
def test_a_policy_of_an_earlier_checkpoint_plays_the_same_game_again(tied_model):
    one, other = (
        make_environment("textarena:TicTacToe-v0", {"opponent": f"hf:{tied_model}"})
        for _ in range(2)
    )
    assert play(one, 3, ["[4]"]) == play(other, 3, ["[4]"])


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "TicTacToe-v0",
            {"opponent": "greedy"},
            "opponent='greedy' is unknown; allowed: random, FILE.py:NAME",
        ),
        ("TicTacToe-v0", {"opponent": "no.module:Thing"}, "there is no module 'no'"),
        ("GuessTheNumber-v0", {"opponent": "random"}, "it is a game of 1, given opponent=.random"),
        (
            "ThreePlayerTicTacToe-v0",
            {"opponent": "random"},
            "ThreePlayerTicTacToe-v0 cannot be made with .*players",
        ),
        ("Debate-v0", {"opponent": "random"}, "cannot be made with .*API key"),
    ],
)
def test_what_cannot_be_played_says_why(name, kwargs, message, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match=message):
        make_environment(f"textarena:{name}", kwargs)


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"holds no config.json; give a Hugging Face folder"
    ):
        make_environment("textarena:TicTacToe-v0", {"opponent": f"hf:{tmp_path}"})


# All games


def test_quitting_pays_nothing_unless_the_games_own_reward_is_asked_for():
    for invalid_reward, expected in (({}, 0.0), ({"invalid_reward": None}, True)):
        env = make_environment("textarena:Mastermind-v0", invalid_reward)
        rewards = [play(env, seed, ["[1 2 3 4]", "quit", "quit"])[-1].reward for seed in range(5)]
        assert rewards == [0.0] * 5 if expected == 0.0 else max(rewards) > 0


def test_the_most_turns_are_the_games_own_limit():
    assert make_environment("textarena:GuessTheNumber-v0", {"max_turns": 4}).max_turns == 5
    env = make_environment("textarena:GuessTheNumber-v0", {"max_number": 10, "max_turns": 4})
    reset_environment(env, 1)
    number = env.game.state.game_state["game_number"]
    steps = play(env, 1, [f"[{guess}]" for guess in range(1, 11) if guess != number][:5])[1:]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert make_environment("textarena:2048-v0-3x3").max_turns is None


@pytest.mark.parametrize(
    "name", ["GuessTheNumber-v0", "Mastermind-v0", "FrozenLake-v0", "Minesweeper-v0-small"]
)
def test_a_sampled_action_is_a_move_that_the_game_takes_and_leaves_it_as_it_was(name):
    one, other = (make_environment(f"textarena:{name}") for _ in range(2))
    assert reset_environment(one, 7) == reset_environment(other, 7)
    generator = random.Random(0)
    for _ in range(3):
        for _ in range(3):
            move = one.sample_action(generator)
        step = step_environment(one, move)
        assert step.info["valid"] and step == step_environment(other, move)
        if step.done:
            break


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("GuessTheNumber-v0", {}),
        ("Mastermind-v0", {}),
        ("FrozenLake-v0", {}),
        ("TicTacToe-v0", {"opponent": "random"}),
        ("Nim-v0", {"opponent": "random"}),
    ],
)
def test_no_text_raises_and_every_reward_is_finite(name, kwargs):
    env = make_environment(f"textarena:{name}", kwargs)
    for text in ODD_TEXTS:
        reset_environment(env, 1)
        for _ in range(2):
            step = step_environment(env, text)
            assert math.isfinite(step.reward)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("FrozenLake-v0-random", {}),
        ("Minesweeper-v0-small", {}),
        ("KuhnPoker-v0", {"opponent": "random"}),
    ],
)
def test_equal_seeds_give_equal_games_in_two_threads(name, kwargs):
    def games(_):
        env = make_environment(f"textarena:{name}", kwargs)
        return [
            json.dumps([reset_environment(env, seed), *play(env, seed, ["[up]", "[0 0]"])])
            for seed in range(100)
        ]

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(games, range(2))
    assert one == other and len(set(one)) > 3


def test_moves_are_drawn_in_the_form_of_the_games_words():
    moves = draw_moves(
        "Write '[pile quantity]', such as '[0 3]'. Piles: 3 4 5.", "", random.Random(0)
    )
    drawn = {next(moves) for _ in range(400)}
    assert (
        "[0 3]" in drawn
        and len({move for move in drawn if move[1:-1].replace(" ", "").isdigit()}) > 10
    )


def test_a_game_that_draws_as_it_is_made_leaves_the_global_generators_alone() -> None:
    """RushHour draws a puzzle then; another thread's game would be drawing from them."""
    pytest.importorskip("textarena")  # whose import draws from them
    before = random.getstate()
    make_environment("textarena:RushHour-v0")
    assert random.getstate() == before


@pytest.mark.parametrize("name", ["KuhnPoker-v0", "Nim-v0", "Blackjack-v0"])
def test_an_episode_does_not_depend_on_those_before_it(name: str) -> None:
    """KuhnPoker shuffles one deck again and again: members of a group would get other cards."""
    kwargs = {} if name == "Blackjack-v0" else {"opponent": "random"}
    used = make_environment(f"textarena:{name}", kwargs)
    for seed in (3, 1, 2, 1, 3):
        fresh = make_environment(f"textarena:{name}", kwargs)
        moves = ["[check]", "[bet]", "[call]"]
        assert play(used, seed, moves) == play(fresh, seed, moves)


@pytest.mark.timeout(60)
def test_a_game_that_fills_its_board_at_each_reset_can_be_reset_again() -> None:
    """Stratego puts its pieces on the board that is there: a full one never takes them all."""
    env = make_environment("textarena:Stratego-v0", {"opponent": "random"})
    assert reset_environment(env, 1) == reset_environment(env, 1) != reset_environment(env, 2)


def test_an_episodes_game_shares_no_table_with_the_next() -> None:
    env = make_environment("textarena:GuessTheNumber-v0")
    words = [str(number) for number in range(2000)]
    unwrapped(env.pristine).words = words
    env.tables = [words]
    reset_environment(env, 1)
    env.game.words.reverse()
    reset_environment(env, 1)
    assert env.game.words[0] == "0"
