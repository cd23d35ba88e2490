"""Tests that what an environment must not return is told with what to write in its place."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from custom.env import BadEnvironment
from custom.env_calls import reset_environment, step_environment


class Returning:
    """Returns from both methods what it is given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def reset(self, seed: int | None = None) -> Any:
        return self.answer

    def step(self, action: str) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("observation", "fix"),
    [
        (None, "'' says nothing"),
        ({"role": "user", "content": "x"}, "put the message into a list"),
        ({"board": 1}, "write it out as the model is to read it"),
        (np.zeros(2), "write it out as the model is to read it"),
        (1.0, "a step returns observation, reward, done, info in this order"),
    ],
)
def test_an_observation_that_is_no_text_is_refused_with_a_way_out(
    observation: Any, fix: str
) -> None:
    for call in (
        lambda: reset_environment(Returning(observation), 0),
        lambda: step_environment(Returning((observation, 1.0, True, {})), "x"),
    ):
        with pytest.raises(BadEnvironment) as caught:
            call()
        assert str(caught.value).endswith(fix)


def test_reward_and_done_in_each_others_place_are_told() -> None:
    with pytest.raises(BadEnvironment, match=r"done=1\.0 \(float\).*reward, done, info in this"):
        step_environment(Returning(("x", True, 1.0, {})), "x")


def test_methods_that_are_coroutines_are_awaited() -> None:
    class Waiting:
        async def reset(self, seed: int | None = None) -> str:
            await asyncio.sleep(0)
            return f"seed {seed}"

        async def step(self, action: str) -> tuple[str, float, bool, dict]:
            await asyncio.sleep(0)
            return action, 1.0, True, {}

    assert reset_environment(Waiting(), 3) == "seed 3"
    assert step_environment(Waiting(), "x") == ("x", 1.0, True, {})


def test_a_coroutine_that_takes_no_seed_draws_from_generators_of_its_own() -> None:
    class Drawing:
        async def reset(self) -> str:
            await asyncio.sleep(0)
            return str(random.random())

    state = random.getstate()
    assert reset_environment(Drawing(), 3) == reset_environment(Drawing(), 3)
    assert reset_environment(Drawing(), 3) != reset_environment(Drawing(), 4)
    assert random.getstate() == state
