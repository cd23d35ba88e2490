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


@pytest.mark.parametrize(("at", "read"), [("3", (3,)), ("[0,4]", (0, 4)), ("every", ())])
def test_turns_are_read_as_numbers(at: str, read: tuple[int, ...]) -> None:
    assert config_of(f"branching.at={at}").section(BranchingSettings).numbered == read


def test_settings_are_read_under_agent_branch_too() -> None:
    given = {
        "at": "[0,9]",
        "samples": "3",
        "random_numbers": "common",
        "max_tokens": "12",
        "state": "copy",
    }
    older = config_of(*(f"agent.branch.{key}={value}" for key, value in given.items()))
    newer = config_of(*(f"branching.{key}={value}" for key, value in given.items()))
    assert older == newer
    settings = older.section(BranchingSettings)
    assert (settings.at, settings.samples, settings.state) == ((0, 9), 3, "copy")


def test_a_wrong_key_under_agent_branch_is_told() -> None:
    with pytest.raises(ConfigError, match=r"branching\.sample.*branching\.samples"):
        config_of("agent.branch.sample=3")


def test_turns_that_no_episode_has_are_refused() -> None:
    (problem,) = config_problems(config_of(VINE[0], "branching.at=[4,9]"))
    assert problem == (
        "branching.at=4,9: turns count from 0, and agent.max_turn=4 allows none above 3: name "
        "turns that are played"
    )
    assert list(config_problems(config_of(VINE[0], "branching.at=[3,9]"))) == []
    # A summary is a turn, too.
    several = ("branching.at=[4]", "agent.context=summarise")
    assert list(config_problems(config_of(VINE[0], *several))) == []


def test_a_list_of_thousands_of_turns_is_refused_in_a_short_sentence() -> None:
    (problem,) = BranchingSettings(at=tuple(range(100_000))).problems()
    assert "names 100,000 turns; allowed: 1000" in problem and len(problem) < 200


TRAINED = (*VINE, "branching.train=true", "actor_rollout_ref.rollout.n=2")


def problems_of(*more: str) -> list[str]:
    return list(config_problems(config_of(*more)))


def test_continuations_may_be_trained_on() -> None:
    assert problems_of(*TRAINED) == []
    assert problems_of(*TRAINED, "algorithm.adv_estimator=tree_grpo", "branching.at=[0,2]") == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("algorithm.adv_estimator=grpo",), "continuations are trained on with vine and tree_grpo"),
        (("algorithm.adv_estimator=vine_redraw",), "trained on with vine and tree_grpo"),
        (("branching.random_numbers=common",), "set branching.random_numbers=fresh"),
        (("branching.at=last",), "set branching.at=every, or numbers of turns"),
        (("branching.at=entropy",), "set branching.at=every, or numbers of turns"),
        (("actor_rollout_ref.actor.use_kl_loss=true",), "actor.use_kl_loss=true"),
        (("algorithm.use_kl_in_reward=true",), "algorithm.use_kl_in_reward=true"),
        (("algorithm.rollout_correction.rollout_is=token",), "algorithm.rollout_correction"),
        (("actor_rollout_ref.actor.router_replay.mode=R3",), "actor.router_replay.mode=R3"),
        (("actor_rollout_ref.actor.loss_agg_counts=rows",), "would count as an episode"),
        (("trainer.train_finished_groups=true",), "trainer.train_finished_groups=true"),
        (("agent.observation_loss_coef=0.1",), "gives episodes several rows"),
    ],
)
def test_what_would_bias_the_training_on_continuations_is_refused(
    more: tuple[str, ...], told: str
) -> None:
    problems = problems_of(*TRAINED, *more)
    assert len(problems) == 1 and told in problems[0]
    assert "branching.train=true" in problems[0]
