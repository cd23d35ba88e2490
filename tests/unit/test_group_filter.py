"""Tests dynamic sampling: which groups vary, what is drawn for them, and where it ends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from data.array_ops import object_array
from data.protocol import DataProto
from training.batch.dynamic_sampling import collect_varied_groups, varied_groups
from training.config import FilterGroupsConfig


def scored(groups: dict[str, list[float]], masked: tuple[tuple[str, int], ...] = ()) -> DataProto:
    """Makes a batch of two tokens a row, scored per group.

    Of each (uid, number) in `masked` nothing was sampled.
    """
    members = [(uid, k, score) for uid, scores in groups.items() for k, score in enumerate(scores)]
    mask = [[int((uid, k) not in masked)] * 2 for uid, k, _ in members]
    return DataProto.from_dict(
        tensors={
            "token_level_scores": torch.tensor([[0.0, score] for _, _, score in members]),
            "response_mask": torch.tensor(mask),
        },
        non_tensors={
            "uid": object_array([uid for uid, _, _ in members]),
            "episode_id": object_array([f"{uid}.{k}" for uid, k, _ in members]),
        },
    )


def test_a_group_varies_where_two_of_its_members_differ() -> None:
    batch = scored({"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 0.0], "d": [0.5, 0.25]})
    assert varied_groups(batch, "seq_reward") == (["b", "d"], 2)


def test_a_masked_member_does_not_make_its_group_vary() -> None:
    batch = scored({"a": [1.0, 1.0, 0.0], "b": [1.0, 0.0, 0.0]}, masked=(("a", 2), ("b", 2)))
    assert varied_groups(batch, "seq_reward") == (["b"], 1)
    nobody = scored({"a": [1.0, 0.0]}, masked=(("a", 0), ("a", 1)))
    assert varied_groups(nobody, "seq_reward") == ([], 1)


def test_an_episode_of_two_rows_is_worth_their_sum() -> None:
    batch = scored({"a": [1.0, 2.0, 3.0], "b": [1.0, 2.0, 4.0]})
    # The first two rows are one episode, of 3.
    for uid, first in (("a", 0), ("b", 3)):
        batch.non_tensor_batch["episode_id"][first + 1] = f"{uid}.0"
    batch.non_tensor_batch["episode_row"] = np.array([0, 1, 0] * 2)
    assert varied_groups(batch, "seq_reward") == (["b"], 1)


def test_another_number_of_the_reward_function_may_be_what_differs() -> None:
    batch = scored({"a": [1.0, 0.0], "b": [1.0, 0.0]})
    batch.non_tensor_batch["reward_info/acc"] = object_array([True, True, True, False])
    assert varied_groups(batch, "acc") == (["b"], 1)
    with pytest.raises(
        ValueError, match=r"metric='akk' is unknown; allowed: acc, score, seq_reward"
    ):
        varied_groups(batch, "akk")


def endless(*batches: dict[str, list[float]]) -> Iterator[DataProto]:
    for number, groups in enumerate(batches):
        yield scored({f"{number}.{uid}": scores for uid, scores in groups.items()})
    raise AssertionError("one batch too many was drawn")


VARIED, UNIFORM = [0.0, 1.0], [1.0, 1.0]


def test_batches_are_drawn_until_there_are_enough_and_what_is_over_is_left() -> None:
    batches = endless(
        {"a": VARIED, "b": UNIFORM, "c": UNIFORM}, {"a": UNIFORM, "b": VARIED, "c": VARIED}
    )
    batch, metrics = collect_varied_groups(batches, FilterGroupsConfig(enable=True), wanted=2)
    assert batch.non_tensor_batch["uid"].tolist() == ["0.a", "0.a", "1.b", "1.b"]
    assert metrics == {"filter_groups/batches": 2, "filter_groups/dropped": 3}


def test_a_first_batch_that_suffices_is_the_only_one() -> None:
    batch, metrics = collect_varied_groups(
        endless({"a": VARIED}), FilterGroupsConfig(enable=True), wanted=1
    )
    assert len(batch) == 2
    assert metrics == {"filter_groups/batches": 1, "filter_groups/dropped": 0}


def test_at_the_bound_the_step_makes_do_with_what_there_is() -> None:
    settings = FilterGroupsConfig(enable=True, max_num_gen_batches=2)
    batch, metrics = collect_varied_groups(
        endless({"a": VARIED, "b": UNIFORM}, {"a": UNIFORM}), settings, wanted=2
    )
    assert batch.non_tensor_batch["uid"].tolist() == ["0.a", "0.a"]
    assert metrics == {"filter_groups/batches": 2, "filter_groups/dropped": 2}


def test_without_any_group_that_varies_the_error_says_what_to_change() -> None:
    settings = FilterGroupsConfig(enable=True, max_num_gen_batches=2)
    with pytest.raises(
        ValueError,
        match=r"in 2 batches no group had two different values of 'seq_reward'.*rollout\.n",
    ):
        collect_varied_groups(endless({"a": UNIFORM}, {"a": UNIFORM}), settings, wanted=1)


def test_of_several_rows_the_last_ones_number_is_what_may_differ() -> None:
    """The rows of each episode stand side by side; their first answers are all judged 0."""
    batch = scored({"a": [0.0, 1.0, 0.0, 0.0], "b": [0.0, 1.0, 0.0, 1.0]})
    for row, uid in enumerate(batch.non_tensor_batch["uid"]):
        batch.non_tensor_batch["episode_id"][row] = f"{uid}.{row % 4 // 2}"
    batch.non_tensor_batch["episode_row"] = np.array([0, 1] * 4)
    batch.batch["turn_ids"] = torch.tensor([[0, 0], [1, 1]] * 4)
    acc = [0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    batch.non_tensor_batch["reward_info/acc"] = object_array(acc)
    assert varied_groups(batch, "acc") == (["a"], 1)


def test_an_episode_of_which_the_reward_function_said_nothing_has_the_number_zero() -> None:
    batch = scored({"a": [0.0, 0.0], "b": [1.0, 0.0]})
    batch.non_tensor_batch["reward_info/acc"] = object_array([None, 0.0, 1.0, None])
    assert varied_groups(batch, "acc") == (["b"], 1)
