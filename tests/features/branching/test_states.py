"""States that are taken of an agent and put into another one; what continuations earned."""

from __future__ import annotations

from typing import Any

import pytest

from custom.agent import Agent
from custom.env import Trajectory
from features.branching.counts import step_problems
from features.branching.measured import discounted, measure
from features.branching.states import MEGABYTE, put, random_action, take
from tests.features.branching import games
from training.config import AgentConfig
from workers.rollout.begin import DIFFERS, SAME, Begin
from workers.rollout.branches import branch_of
from workers.rollout.episode import Episode, FailedAttempt, Row, Span, Turn


def total(trajectory: Trajectory, environment: Any) -> float:
    return sum(trajectory.rewards) + len(trajectory.actions)


@pytest.mark.parametrize("kind", ["snapshot", "copy"])
def test_a_state_goes_on_in_another_agent_with_what_was_played(kind: str) -> None:
    one, other = (Agent(games.Held(), reward_fn=total) for _ in range(2))
    one.reset(11)
    one.step("1")
    state = take(one, kind, MEGABYTE)
    put(other, kind, state, None)
    assert one.step("2") == other.step("2")
    assert one.episode_reward("done") == other.episode_reward("done")
    assert one.environment is not other.environment


def test_a_state_is_as_it_was_when_it_was_taken() -> None:
    agent, first, second = (Agent(games.Held()) for _ in range(3))
    agent.reset(11)
    state = take(agent, "copy", MEGABYTE)
    agent.step("1")
    for other in (first, second):
        put(other, "copy", state, None)
        assert other.environment.turns_left == 4
        other.step("1")


def test_luck_is_drawn_anew_with_its_seed() -> None:
    agent, other = Agent(games.Held()), Agent(games.Held())
    agent.reset(11)
    put(other, "snapshot", take(agent, "snapshot", MEGABYTE), 3)
    assert other.environment.luck == 3 and agent.environment.luck == 4


@pytest.mark.parametrize(
    ("environment", "kind", "reason"),
    [
        (games.Heavy, "snapshot", "branching.max_state_mb allows 1"),
        (games.Text, "snapshot", "returned a str; allowed: bytes"),
        (games.Plain, "snapshot", "Plain has no snapshot()"),
        (games.Uncopied, "copy", "cannot pickle"),
    ],
)
def test_a_state_that_cannot_be_taken_has_a_reason(
    environment: Any, kind: str, reason: str
) -> None:
    agent = Agent(environment())
    agent.reset(11)
    said = take(agent, kind, MEGABYTE)
    assert said.startswith("-") and reason in said


def test_a_random_answer_is_the_environments_or_a_word() -> None:
    assert random_action(Agent(games.Held()), 1, 0, "") in {str(n) for n in range(1, 11)}
    assert random_action(Agent(object()), 1, 0, "only") == "only"
    assert random_action(Agent(object()), 1, 0, "") == "hello"


def an_episode(*rewards: float, ending: str = "done", begin: Begin | None = None) -> Episode:
    """An episode with a token a turn, each with its reward."""
    row = Row(prompt_ids=[1, 2])
    row.append_tokens([5] * len(rewards))
    row.spans = [Span(place, place + 1, place) for place in range(len(rewards))]
    row.reward_at = dict(enumerate(rewards))
    turns = [Turn(text="5", finish_reason="stop", tokens=1) for _ in rewards]
    episode = Episode(group=0, sample=0, rows=[row], turns=turns, ending=ending)
    if begin is not None:
        branch = branch_of(episode, begin)
        branch.rows, branch.turns, branch.ending = [row], turns, ending
        return branch
    return episode


def begin(turn: int) -> Begin:
    prefix: list[Any] = [None] * turn
    return Begin(prefix=prefix, replies=[], word=f"{turn}.0")


def test_a_return_counts_from_the_branchs_turn_on() -> None:
    episode = an_episode(1.0, 2.0, 4.0)
    episode.branches = [
        an_episode(1.0, 2.0, 8.0, begin=begin(1)),
        an_episode(1.0, 16.0, begin=begin(1)),
        an_episode(1.0, 2.0, ending=SAME, begin=begin(2)),
    ]
    measured = measure(episode, AgentConfig(), turn_gamma=0.5)
    assert measured.returns == [[], [2.0 + 0.5 * 8.0, 16.0], [4.0]]
    assert measured.rewards == [1.0, 2.0, 4.0] and measured.tokens == [1, 1, 1]
    assert measured.sampled_tokens == 2 + 1 + 0 and measured.prefilled_tokens == 3 + 3 + 0
    assert discounted([1.0, 2.0, 4.0], 0.5) == 3.0


@pytest.mark.parametrize(
    ("ending", "policy", "counts"),
    [
        ("env_crash", "refill", False),
        ("env_timeout", "refill", True),
        ("env_timeout", "mask", False),
        ("env_crash", "zero", True),
        ("engine_error", "zero", False),
        ("overflow", "mask", True),
        (DIFFERS, "zero", False),
    ],
)
def test_what_counts_is_what_the_failure_policy_trains_on(
    ending: str, policy: Any, counts: bool
) -> None:
    episode = an_episode(1.0, 2.0)
    episode.branches = [an_episode(0.0, 0.0, ending=ending, begin=begin(1))]
    measured = measure(episode, AgentConfig(on_failure=policy), 1.0)
    assert measured.returns == [[], [0.0] if counts else []]
    assert len(measured.left_out) == (0 if counts else 1)
    assert measured.endings == {ending: 1}


def test_a_branch_that_failed_has_prefilled_what_its_attempts_began_with() -> None:
    episode = an_episode(1.0, 2.0)
    failed = an_episode(0.0, 0.0, ending="env_crash", begin=begin(1))
    failed.rows = []
    failed.failed_attempts = [FailedAttempt(failed.turns, "env_crash", "")]
    early = an_episode(0.0, ending="env_crash", begin=begin(1))
    early.rows = []
    episode.branches = [failed, early]
    measured = measure(episode, AgentConfig(on_failure="refill"), 1.0)
    assert measured.prefilled_tokens == 2 * 3 and measured.sampled_tokens == 2
    assert len(measured.left_out) == 2


@pytest.mark.parametrize(
    ("counts", "subjects"),
    [
        ({"continuations": 8.0}, []),
        ({"continuations": 8.0, "left_out": 1.0}, ["left out"]),
        ({"continuations": 20.0, "left_out": 2.0}, []),
        ({}, ["none"]),
        ({"refused_states": 2.0}, ["refused"]),
    ],
)
def test_continuations_that_do_not_count_are_warned_of(
    counts: dict[str, float], subjects: list[str]
) -> None:
    names = ("continuations", "left_out", "refused_states")
    metrics = {f"branching/{name}": counts.get(name, 0.0) for name in names}
    facts = [{"branches": {"reasons": ["no way back"]}}, {}]
    told = list(step_problems(metrics, facts))
    assert [subject for subject, _ in told] == subjects
    assert all("no way back" in text for subject, text in told if subject != "none")
