"""Tests the checks of reward models, managers and functions."""

from __future__ import annotations

from pathlib import Path

import pytest

from custom.reward_manager import get_reward_manager_cls
from tests.unit.config.helpers import assert_refused, checked
from training.config.loader import load_config
from training.config.resources.rewards import MANAGERS_WITHOUT_NEEDS
from training.reward import load_reward_manager


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["reward_model.overlong_buffer.enable=true", "data.max_response_length=40"],
            "reward_model.overlong_buffer.len=0 must be 1 to data.max_response_length tokens, 40",
        ),
        (
            ["reward_model.enable=true"],
            "reward_model.enable=true needs reward_model.model.path: a sequence classification "
            "model with one output",
        ),
        (
            ["reward_model.reward_manager=batch"],
            "reward_model.reward_manager=batch needs custom_reward_function.path: a function that "
            "takes lists",
        ),
    ],
)
def test_a_reward_that_lacks_something_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_managers_that_are_taken_without_a_look_are_there_and_need_nothing() -> None:
    """A config with these names is checked without importing torch."""
    for name in MANAGERS_WITHOUT_NEEDS:
        assert not hasattr(get_reward_manager_cls(name), "check_config")


SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, tolerance=0.0):
    return 0.0

def anything(**kwargs):
    return 0.0
"""


@pytest.mark.seconds
def test_reward_kwargs_that_nobody_takes_are_problems(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(SCORE)
    own, kwargs = (
        [f"custom_reward_function.path={tmp_path / 'score.py'}"],
        "custom_reward_function.reward_kwargs",
    )
    for_manager = "reward_model.reward_kwargs"
    assert checked(runnable, *own, f"{kwargs}.tolerance=0.1", f"{for_manager}.tolerance=0.1") == []
    for key in (kwargs, for_manager):
        assert checked(runnable, *own, f"{key}.tolerence=0.1") == [
            f"{key}.tolerence: there is no such argument; compute_score takes data_source, "
            "solution_str, ground_truth, extra_info, tolerance. Did you mean 'tolerance'?"
        ]
    assert (
        checked(
            runnable,
            *own,
            "custom_reward_function.name=anything",
            f"{kwargs}.x=1",
            f"{for_manager}.y=2",
        )
        == []
    )
    assert checked(runnable, f"{for_manager}.method=flexible") == []
    (problem,) = checked(runnable, f"{for_manager}.methd=flexible")
    assert "default_compute_score takes" in problem and problem.endswith("Did you mean 'method'?")
    prime = ["reward_model.reward_manager=prime", f"{for_manager}.num_processes=2"]
    assert checked(runnable, *prime, f"{for_manager}.method=flexible") == []
    (problem,) = checked(runnable, *prime, f"{for_manager}.methd=flexible")
    assert problem.endswith("Did you mean 'method'?")


def test_a_manager_of_ones_own_takes_its_reward_kwargs(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from custom.reward_manager import register_reward_manager\n\n"
        "@register_reward_manager('config_test_manager')\nclass Manager:\n"
        "    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key='', *, "
        "scale=1.0):\n"
        "        pass\n"
    )
    mine = [
        f"custom_algorithm={tmp_path / 'mine.py'}",
        "reward_model.reward_manager=config_test_manager",
    ]
    assert checked(runnable, *mine, "reward_model.reward_kwargs.scale=2") == []
    assert checked(runnable, *mine, "reward_model.reward_kwargs.scael=2") == [
        "reward_model.reward_kwargs.scael: there is no such argument; Manager takes scale. Did "
        "you mean 'scale'?"
    ]


def test_the_functions_file_may_hold_the_manager_alone(runnable: list[str], tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text(
        "from custom.reward_manager import register_reward_manager\n\n"
        "@register_reward_manager('manager_alone')\nclass Manager:\n"
        "    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key=''):\n"
        "        self.compute_score = compute_score\n"
    )
    path = f"custom_reward_function.path={tmp_path / 'alone.py'}"
    mine = [path, "reward_model.reward_manager=manager_alone"]
    assert checked(runnable, *mine) == []
    config = load_config([*runnable, *mine], check=False).config
    manager = load_reward_manager(config, None, num_examine=0)
    assert type(manager).__name__ == "Manager" and manager.compute_score is None
    for others in ([path], [*mine, "custom_reward_function.name=score"]):
        (problem,) = checked(runnable, *others)
        assert "does not define" in problem
