"""Tests reasoning-gym's tasks: odd answers, settings, seeds."""

import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from custom.env_calls import reset_environment, step_environment
from custom.env_factory import make_environment
from custom.reward_score import default_compute_score

# A policy may write these; games, parsers and verifiers stumble over them.
ODD_TEXTS = (
    *(
        "",
        " ",
        "\n",
        "\r\n\t",
        "\x00",
        "no idea",
        "None",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "9**9**9",
        "9" * 5000,
    ),
    *(
        "1/0",
        "-1",
        "0.1.2",
        "1,2;3|4",
        "[",
        "]",
        "[]",
        "[[",
        "[]]",
        "[[1]]",
        "{",
        "{}",
        "{'a': 1}",
        "(" * 50,
    ),
    *(
        "[9999999]",
        "[-1 -1]",
        "[a1 b2 c3]",
        "[quit]",
        "[1 2 3 4]",
        "é漢字",
        "\ud800",
        "🙂" * 10,
        "a" * 100_000,
    ),
    *(
        "x" + " y" * 2000,
        "<answer></answer>",
        "</think>",
        "\\frac{1}{0}",
        "\\help",
        "__import__('os')",
        "*** The End ***",
    ),
)


@pytest.mark.parametrize(
    "name", ["chain_sum", "prime_factorization", "leg_counting", "word_sorting", "boxnet"]
)
def test_no_answer_raises_and_every_reward_is_finite(name):
    env = make_environment(f"reasoning_gym:{name}")
    assert env.max_turns == 1 and len(ODD_TEXTS) >= 40
    for text in ODD_TEXTS:
        reset_environment(env, 0)
        step = step_environment(env, text)
        assert math.isfinite(step.reward) and step.observation.startswith("That is not right.")


def test_an_answer_at_which_the_verifier_raises_scores_nothing_and_says_why():
    env = make_environment("reasoning_gym:prime_factorization")
    reset_environment(env, 0)
    step = step_environment(env, "no idea")
    assert (step.observation, step.reward, step.done) == ("That is not right.", 0.0, True)
    assert "ValueError" in step.info["error"]
    row = {"entry": json.dumps(env.entry)}
    assert default_compute_score("reasoning_gym/prime_factorization", "no idea", "", row) == 0.0
    assert (
        default_compute_score("reasoning_gym/prime_factorization", env.entry["answer"], "", row)
        == 1.0
    )


def test_settings_that_a_dataset_does_not_take_are_named():
    with pytest.raises(ValueError, match="reasoning_gym:composite cannot be made with"):
        make_environment("reasoning_gym:composite")
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'min_term'"):
        make_environment("reasoning_gym:chain_sum", {"min_term": 2})


def test_composite_takes_plain_settings_and_is_scored_by_the_dataset_of_its_task():
    sums = {"name": "chain_sum", "weight": 1, "config": {"min_terms": 2, "max_terms": 2}}
    env = make_environment("reasoning_gym:composite", {"datasets": [sums]})
    assert "+" in reset_environment(env, 3) or "-" in reset_environment(env, 3)
    row = {"entry": json.dumps(env.entry)}
    assert default_compute_score("reasoning_gym/composite", env.entry["answer"], "", row) == 1.0
    assert step_environment(env, env.entry["answer"]).reward == 1.0


# list_functions and pool_matrix draw from Python's and numpy's global generators.
@pytest.mark.seconds
@pytest.mark.parametrize("name", ["chain_sum", "leg_counting", "word_sorting", "pool_matrix"])
def test_equal_seeds_give_equal_tasks_in_two_threads_while_others_draw(name):
    stop = threading.Event()

    def draw():
        while not stop.wait(1e-4):
            random.random(), random.shuffle([1, 2, 3])

    def tasks(_):
        env = make_environment(f"reasoning_gym:{name}")
        return [reset_environment(env, seed) for seed in range(100)]

    with ThreadPoolExecutor(3) as pool:
        pool.submit(draw)
        one, other = pool.map(tasks, range(2))
        stop.set()
    assert one == other and len(set(one)) > 50


@pytest.mark.parametrize("name", ["list_functions", "pool_matrix"])
def test_a_dataset_that_draws_from_the_global_generators_gives_its_seeds_task(name):
    env = make_environment(f"reasoning_gym:{name}")
    drawn = []
    for state in (1, 2):
        random.seed(state), np.random.seed(state)
        drawn.append([reset_environment(env, seed) for seed in range(30)])
    assert drawn[0] == drawn[1]


def test_a_sampled_answer_is_of_the_truths_kind():
    generator = random.Random(0)
    env = make_environment("reasoning_gym:chain_sum")
    for seed in range(20):
        reset_environment(env, seed)
        assert env.sample_action(generator).isdigit()
    words = make_environment("reasoning_gym:word_sorting")
    question = reset_environment(words, 0).split()
    assert set(words.sample_action(generator).split()) <= set(question)
