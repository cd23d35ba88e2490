"""Slow seeds, cut texts and turns that cost ring; what only looks like them does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from features.alarms.rule import ALARMS
from features.alarms.rules.slow_episodes import SlowEpisodeRules
from features.alarms.rules.tools import cut_observations
from features.alarms.rules.turn_costs import TurnCostRules
from features.alarms.seen_step import SeenStep
from tests.features.alarms.made_steps import changed, made_run, seen_step
from training.config import PPOConfig

SIZE = 16


def step_of(
    episodes: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, float] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
    config: PPOConfig | None = None,
) -> SeenStep:
    """Makes a step of such episodes, of one row of four tokens each."""
    size = len(episodes)
    facts = np.empty(size, dtype=object)
    plain = {"ending": "done", "turns": 2, "seconds": 0.2, "env_seconds": 0.1, "tool_calls": []}
    for row, own in enumerate(episodes):
        facts[row] = {**plain, **own}
    paid = torch.zeros(size, 4) if rewards is None else torch.tensor(rewards)
    batch = DataProto.from_dict(
        tensors={"response_mask": torch.ones(size, 4), "environment_rewards": paid},
        non_tensors={
            "uid": np.array([f"g{row}" for row in range(size)], dtype=object),
            "episode_id": np.array([f"e{row}" for row in range(size)], dtype=object),
            "env_seed": np.array([100 + row for row in range(size)], dtype=object),
            "episode_facts": facts,
        },
    )
    return seen_step(batch, metrics, config=config)


def slow(seconds: float, **own: Any) -> dict[str, Any]:
    return {"seconds": seconds, "env_seconds": seconds, **own}


FAST = [{}] * (SIZE - 1)
HELD = {"timing_s/step": 4.0}


def test_a_seed_that_holds_two_steps_is_named_with_its_tool() -> None:
    rules = SlowEpisodeRules(made_run())
    call = {"name": "search", "ok": True, "error_kind": "", "seconds": 2.9}
    step = step_of([*FAST, slow(3.0, tool_calls=[call])], HELD)
    assert list(rules.slow_episodes(step)) == []
    assert list(rules.slow_episodes(step_of([*FAST, {}], HELD))) == []
    [finding] = rules.slow_episodes(step)
    assert finding.text == (
        "1 of 16 episodes (seed 115) took up to 3 s in their environment, most of it in the tool "
        "search, where 0.1 s is usual: the step, of 4 s, waits for them, as did 2 of 3 steps"
    )
    assert finding.place.episode == "e15"


@pytest.mark.parametrize(
    ("episodes", "metrics"),
    [
        ([*FAST, slow(3.0)], {"timing_s/step": 40.0}),
        ([*FAST, slow(0.9)], {"timing_s/step": 1.0}),
        ([{}] * 8 + [slow(3.0)] * 8, HELD),
        ([slow(2.0)] * 15 + [slow(3.5)], HELD),
        ([*FAST, {"seconds": 3.0}], HELD),
        ([{}] * 3 + [slow(3.0)], HELD),
    ],
    ids=["long step", "short wait", "half are", "all are", "the engine's", "few episodes"],
)
def test_steps_that_wait_for_others_do_not_ring(
    episodes: list[dict[str, Any]], metrics: dict[str, float]
) -> None:
    rules = SlowEpisodeRules(made_run())
    for _ in range(4):
        assert list(rules.slow_episodes(step_of(episodes, metrics))) == []


def test_where_the_next_step_plays_meanwhile_nothing_waits() -> None:
    config = changed(PPOConfig(), "trainer.async_level", 1)
    rules = SlowEpisodeRules(made_run(config))
    for _ in range(4):
        assert not list(rules.slow_episodes(step_of([*FAST, slow(3.0)], HELD, config=config)))


def test_a_tool_whose_results_are_cut_is_named_and_leads_to_one() -> None:
    call = {"name": "search", "ok": True, "chars_left_out": 900}
    metrics = {"tool/search/calls": 16.0, "tool/search/cut": 4.0}
    [finding] = cut_observations(step_of([*FAST, {"tool_calls": [call]}], metrics))
    assert finding.text == "4 of 16 results of search are cut at agent.max_observation_chars=20000"
    assert finding.place.episode == "e15"
    replies = {"agent/cut_observations": 8.0, "agent/episodes": 16.0, "agent/turns/mean": 2.0}
    [finding] = cut_observations(step_of(FAST, replies))
    assert finding.text == "replies to 8 of 32 turns are cut at agent.max_observation_chars=20000"


@pytest.mark.parametrize(
    "metrics",
    [
        {"tool/search/calls": 16.0, "tool/search/cut": 3.0},
        {"tool/search/calls": 7.0, "tool/search/cut": 7.0},
        {"agent/cut_observations": 7.0, "agent/episodes": 16.0, "agent/turns/mean": 2.0},
        {"agent/cut_observations": 7.0, "agent/episodes": 7.0, "agent/turns/mean": 1.0},
        {},
    ],
)
def test_a_few_cut_texts_do_not_ring(metrics: dict[str, float]) -> None:
    assert list(cut_observations(step_of(FAST, metrics))) == []


def turns_of(rules: TurnCostRules, kinds: Sequence[tuple[int, float, float, str]]) -> list[str]:
    """Shows a step of episodes: turns, what was paid before the last one and with it, ending."""
    episodes = [{"turns": turns, "ending": ending} for turns, _, _, ending in kinds]
    rewards = [[before, 0.0, 0.0, last] for _, before, last, _ in kinds]
    return [finding.text for finding in rules.early_ends(step_of(episodes, rewards=rewards))]


PLAYS = [(4, -0.3, 1.0, "done")] * 4 + [(4, -0.3, -0.1, "done")] * 12
GIVES_UP = [(1, 0.0, -0.1, "done")] * 16


def test_a_policy_that_gives_up_since_turns_cost_is_told_also_after_a_resume() -> None:
    assert "turns_cost" in ALARMS and ALARMS["turns_cost"].waits
    before = TurnCostRules(made_run())
    assert turns_of(before, PLAYS) == []
    rules = TurnCostRules(made_run())
    rules.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert turns_of(rules, GIVES_UP) == [
        "episodes end after 1 turns, 4 was the most, and 0% of them win something at their end, "
        "once 25% did: turns cost, and the policy ends before it wins"
    ]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (PLAYS, [(1, 0.0, 1.0, "done")] * 16),
        ([(4, 0.0, 1.0, "done")] * 4 + [(4, 0.0, 0.0, "done")] * 12, GIVES_UP),
        ([(4, -0.3, -0.1, "done")] * 16, GIVES_UP),
        (PLAYS, [(1, 0.0, 0.0, "overflow")] * 16),
        (PLAYS, [(3, -0.2, -0.1, "done")] * 16),
        (PLAYS, GIVES_UP[:7]),
    ],
    ids=["wins at once", "turns are free", "never won", "overflows", "as long", "few episodes"],
)
def test_other_short_episodes_do_not_ring(first: list[Any], then: list[Any]) -> None:
    rules = TurnCostRules(made_run())
    assert turns_of(rules, first) == turns_of(rules, then) == []
