"""What a failed episode costs, by its ending and the config."""

from __future__ import annotations

from typing import Any

import pytest

from training.config import AgentConfig
from workers.rollout.engine import Completion
from workers.rollout.episode import FAILURES, Episode, Row
from workers.rollout.failure_policy import apply_failure_policy


def ended(ending: str, **agent: Any) -> Episode:
    """Returns an episode of one turn with a reward of 1, as it is trained on."""
    row = Row(prompt_ids=[1])
    row.append_sampled(
        Completion(request_id="0", token_ids=[2, 3], log_probs=[-0.5] * 2, finish_reason="stop"), 0
    )
    episode = Episode(group=0, sample=0, rows=[row], ending=ending)
    episode.add_reward(1.0)
    apply_failure_policy(episode, AgentConfig(**agent))
    return episode


@pytest.mark.parametrize("on_failure", ["zero", "mask", "refill"])
@pytest.mark.parametrize("ending", ["done", "max_turns", "overflow"])
def test_what_did_not_fail_keeps_its_tokens_and_rewards(ending: str, on_failure: str) -> None:
    episode = ended(ending, on_failure=on_failure)
    assert episode.row.reward_at == {1: 1.0} and episode.row.spans


@pytest.mark.parametrize(
    ("on_failure", "masked"),
    [
        ("zero", {"engine_error"}),
        ("mask", set(FAILURES)),
        ("refill", {"engine_error", "env_crash"}),
    ],
)
def test_a_failed_episode_loses_its_rewards_and_what_is_not_the_policys_doing_is_masked(
    on_failure: str, masked: set[str]
) -> None:
    for ending in FAILURES:
        episode = ended(ending, on_failure=on_failure)
        assert episode.row.reward_at == {}
        assert bool(episode.row.spans) == (ending not in masked), ending


def test_an_overflow_is_paid_on_top_where_the_config_says_so() -> None:
    assert ended("overflow", overflow_reward=-0.25).row.reward_at == {1: 0.75}
    assert ended("done", overflow_reward=-0.25).row.reward_at == {1: 1.0}
