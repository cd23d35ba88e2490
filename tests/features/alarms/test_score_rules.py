"""Tests what alarms say of scores where an episode has several rows."""

from __future__ import annotations

import numpy as np
import torch

from data.array_ops import object_array
from data.protocol import DataProto
from features.alarms.finding import Finding
from features.alarms.rules.rewards import ScoreRules, unpaid_rewards
from tests.features.alarms.made_steps import made_run, seen_step


def two_rows(scores: list[float], mask: list[int]) -> DataProto:
    """Makes an episode of two rows, a token each, and another one of one row."""
    return DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor(scores)[:, None],
            "response_mask": torch.tensor(mask)[:, None],
            "responses": torch.tensor([[5], [6], [7]]),
            "turn_ids": torch.tensor([[0], [1], [0]]),
        },
        non_tensors={
            "uid": object_array(["g"] * 3),
            "episode_id": object_array(["a", "a", "b"]),
            "episode_row": np.array([0, 1, 0]),
        },
    )


def findings(batch: DataProto, given: list[float]) -> list[Finding]:
    seen = seen_step(batch, given=torch.tensor(given, dtype=torch.float64))
    return list(ScoreRules(made_run()).changed_scores(seen))


def test_a_score_that_moved_to_another_row_of_its_episode_is_the_one_that_was_given() -> None:
    """The second row was left out, and its score lies on the first."""
    assert not findings(two_rows([1.0, 0.0, 0.5], [1, 0, 1]), given=[0.0, 1.0, 0.5])


def test_an_episode_that_lost_its_score_with_a_row_is_named() -> None:
    [finding] = findings(two_rows([0.0, 0.0, 0.5], [1, 0, 1]), given=[0.0, 1.0, 0.5])
    assert "1 of 2 episodes" in finding.text and "with 0 for 1" in finding.text


def test_an_episode_of_which_nothing_is_trained_on_lost_nothing() -> None:
    assert not findings(two_rows([0.0, 0.0, 0.5], [0, 0, 1]), given=[0.0, 1.0, 0.5])


def test_what_an_episode_was_paid_is_compared_with_all_its_conversations() -> None:
    batch = two_rows([1.0, 0.5, 0.0], [1, 1, 1])
    batch.batch["environment_rewards"] = batch.batch["token_level_scores"].clone()
    batch.non_tensor_batch["agent_conversation"] = object_array(["solver/0", "critic/0", ""])
    facts = [{"paid": 1.5, "ending": "done"}, None, {"paid": 0.0, "ending": "done"}]
    batch.non_tensor_batch["episode_facts"] = object_array(facts)
    assert not list(unpaid_rewards(seen_step(batch)))
    batch.batch["environment_rewards"][1] = 0.0
    [finding] = unpaid_rewards(seen_step(batch))
    assert "episode a was paid 1.5, and is trained on with 1" in finding.text
