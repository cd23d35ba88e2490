"""What branching cannot go with is refused with a sentence; what nothing reads is said."""

from __future__ import annotations

import pytest

from features.branching.checks import config_problems
from features.branching.settings import BranchingSettings
from tests.conftest import PROJECT
from training.config import PPOConfig
from training.config.loader import ConfigError, load_config

GAME = str(PROJECT / "configs/quickstart.yaml")
VINE = ("algorithm.adv_estimator=vine", "branching.at=every")


def config_of(*more: str, file: str = GAME) -> PPOConfig:
    return load_config([file, *more], check=False).config


@pytest.mark.parametrize("name", ["vine", "vine_redraw", "tree_grpo"])
def test_an_estimator_of_continuations_is_refused_where_none_are_sampled(name: str) -> None:
    (problem,) = config_problems(config_of(f"algorithm.adv_estimator={name}"))
    assert problem == (
        f"algorithm.adv_estimator={name} reads branch_returns, what continuations of turns earned, "
        "and branching.at=never samples none: set branching.at=every, say"
    )
    at = "branching.at=[0,2]"
    assert list(config_problems(config_of(f"algorithm.adv_estimator={name}", at))) == []


def test_without_branching_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert list(config_problems(config_of())) == [] and not caplog.records


def test_continuations_that_nobody_reads_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert list(config_problems(config_of("branching.at=last"))) == []
    assert "algorithm.adv_estimator=gae does not read them" in caplog.text


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("trainer.async_level=1",), "new weights may come between"),
        (("reward_model.enable=true",), "continuations are paid by their environment alone"),
    ],
)
def test_a_run_that_changes_what_is_measured_is_refused(more: tuple[str, ...], told: str) -> None:
    assert told in "\n".join(config_problems(config_of(*VINE, *more)))


def test_programs_and_prompts_have_no_states() -> None:
    program = str(PROJECT / "configs/quickstart_program.yaml")
    assert "a program plays by itself" in "\n".join(config_problems(config_of(*VINE, file=program)))
    prompts = str(PROJECT / "configs/tiny_prompts.yaml")
    assert "there is none" in "\n".join(config_problems(config_of(*VINE, file=prompts)))


@pytest.mark.parametrize("at", ["[every,last]", "[0,every]", "[]", "sometimes", "[-1]", "1.5"])
def test_a_place_that_is_none_is_refused(at: str) -> None:
    try:
        problems = list(config_of(f"branching.at={at}").section(BranchingSettings).problems())
    except ConfigError as error:
        problems = error.problems
    assert problems and "branching.at" in problems[0]


def test_a_word_that_is_no_place_is_one_problem_that_names_the_places() -> None:
    with pytest.raises(ConfigError) as told:
        config_of("branching.at=all")
    assert told.value.problems == [
        "branching.at[0]='all' (command line): must be a whole number, or one of 'never', 'every', "
        "'random', 'last' or 'entropy'"
    ]


def test_turns_that_no_episode_has_are_told(caplog: pytest.LogCaptureFixture) -> None:
    more = ("algorithm.adv_estimator=vine", "agent.max_turn=3")
    list(config_problems(config_of(*more, "branching.at=[2]")))
    assert not caplog.records
    list(config_problems(config_of(*more, "branching.at=[3,5]")))
    assert "branching.at=3,5: with agent.max_turn=3 an episode has the turns 0 to 2" in caplog.text


@pytest.mark.parametrize(("at", "read"), [("3", (3,)), ("[0,4]", (0, 4)), ("every", ())])
def test_turns_are_read_as_numbers(at: str, read: tuple[int, ...]) -> None:
    assert config_of(f"branching.at={at}").section(BranchingSettings).numbered == read
