"""Empty answers that earn more than others are found, and chance is not taken for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from features.alarms.rules.rewards import SilenceRules
from tests.features.alarms.made_steps import made_run, seen_step
from training.run.metrics.group_metrics import compute_group_metrics

END, WORD = 2, 7


def batch_of(scores: np.ndarray, is_empty: np.ndarray, members: int) -> DataProto:
    """Answers of one word, or of none, and their ends; groups of so many."""
    size = len(scores)
    responses = torch.tensor([[END, 0] if empty else [WORD, END] for empty in is_empty])
    mask = torch.tensor([[1, 0] if empty else [1, 1] for empty in is_empty])
    rewards = torch.zeros(size, 2)
    rewards[:, 0] = torch.from_numpy(scores)
    return DataProto.from_dict(
        tensors={"responses": responses, "response_mask": mask, "token_level_scores": rewards},
        non_tensors={
            "uid": np.array([f"g{row // members}" for row in range(size)], dtype=object),
            "data_source": np.array(["game"] * size, dtype=object),
        },
    )


def rings(rules: SilenceRules, batch: DataProto) -> list[str]:
    return [finding.text for finding in rules.paid_silence(seen_step(batch))]


@pytest.mark.parametrize("members", [4, 1])
def test_paid_silence_is_found_in_groups_and_without_them(members: int) -> None:
    is_empty = np.arange(64) % 4 == 0
    batch = batch_of(np.where(is_empty, 1.0, 0.1), is_empty, members)
    rules = SilenceRules(made_run(textless_ids=[END]))
    [text] = rings(rules, batch)
    assert text == ("16 of 64 episodes are without a word and earned 1 on average, the others 0.1")
    # Once all are silent, it still stands.
    silent = np.ones(64, dtype=bool)
    [text] = rings(rules, batch_of(silent * 1.0, silent, members))
    assert text.startswith("64 of 64 episodes are without a word; in the steps before")


@pytest.mark.seconds
@pytest.mark.parametrize("members", [8, 1])
@pytest.mark.parametrize("paid", [0.01, 0.1, 0.5, 0.97])
def test_rewards_that_do_not_depend_on_the_answer_raise_nothing(members: int, paid: float) -> None:
    generator = np.random.default_rng(0)
    rules = SilenceRules(made_run(textless_ids=[END]))
    for _ in range(200):
        scores = (generator.random(64) < paid).astype(float)
        assert not rings(rules, batch_of(scores, generator.random(64) < 0.1, members))


def test_silence_that_earns_less_or_as_much_raises_nothing() -> None:
    is_empty = np.arange(64) % 4 == 0
    for score in (0.0, 0.5):
        rules = SilenceRules(made_run(textless_ids=[END]))
        scores = np.where(is_empty, score, 0.5)
        assert not any(rings(rules, batch_of(scores, is_empty, 4)) for _ in range(8))


def test_groups_without_spread_and_empty_episodes_are_counted_without_dummies() -> None:
    scores = np.array([1.0, 1.0, 0.0, 1.0, 5.0])
    is_empty = np.array([False, True, False, False, True])
    batch = batch_of(scores, is_empty, 2)
    batch.non_tensor_batch["uid"][4] = "dummy"
    assert compute_group_metrics(batch, [END]) == {
        "response/empty_ratio": 0.25,
        "response/rows_per_episode": 1.0,
        "groups/no_spread": 0.5,
    }


def test_an_episode_of_several_rows_counts_once() -> None:
    batch = batch_of(np.array([1.0, 0.0, 1.0]), np.array([True, False, False]), 3)
    batch.non_tensor_batch["episode_id"] = np.array(["a", "a", "b"], dtype=object)
    batch.non_tensor_batch["episode_row"] = np.array([0, 1, 0])
    assert compute_group_metrics(batch, [END]) == {
        "response/empty_ratio": 0.0,
        "response/rows_per_episode": 1.5,
        "groups/no_spread": 1.0,
    }


def test_a_batch_without_a_token_to_train_on_has_no_such_numbers() -> None:
    batch = batch_of(np.array([1.0, 0.0]), np.array([True, True]), 2)
    batch.batch["response_mask"].zero_()
    assert compute_group_metrics(batch, [END]) == {}


def test_roles_of_a_prompt_are_groups_of_their_own() -> None:
    batch = batch_of(np.array([1.0, 0.0, 1.0, 0.0]), np.zeros(4, dtype=bool), 4)
    batch.non_tensor_batch["agent_role"] = np.array(["solver", "critic"] * 2, dtype=object)
    assert compute_group_metrics(batch, [END])["groups/no_spread"] == 1.0
