"""The plan of a step: one decision, which driver and workers share."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.array_ops import object_array
from data.protocol import DUMMY_UID, DataProto
from training.batch.rank_layout import arrange
from training.config import BatchPlan, UpdatePlan
from training.config.loader import ConfigError, load_config
from workers.model.mini_batches import rows_of_updates


def batch_of(rows_per_prompt: list[int]) -> DataProto:
    """A batch of prompts p0, p1 ... with so many rows each, of 3 to 7 tokens."""
    uids = [f"p{prompt}" for prompt, rows in enumerate(rows_per_prompt) for _ in range(rows)]
    lengths = torch.tensor([3 + i % 5 for i in range(len(uids))])
    mask = (torch.arange(7) < lengths[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "attention_mask": mask,
            "response_mask": mask.clone(),
            "row": torch.arange(len(uids)),
        },
        non_tensors={"uid": object_array(uids)},
    )


def plan_of(prompts: int, ranks: int, actor: int, critic: int, balance: bool = True) -> BatchPlan:
    """Mini-batches in prompts, as a config gives them."""
    actor_plan, critic_plan = (UpdatePlan(mini_batches=prompts // size) for size in (actor, critic))
    return BatchPlan(
        prompts=prompts, ranks=ranks, balance=balance, actor=actor_plan, critic=critic_plan
    )


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("actor", "critic"), [(6, 3), (3, 6), (12, 4), (2, 2)])
def test_every_mini_batch_of_either_model_has_its_own_prompts_on_any_number_of_ranks(
    actor: int, critic: int, ranks: int, balance: bool
) -> None:
    """12 prompts, two samples each, one episode of two rows: 25 rows, which nothing divides."""
    batch, plan = batch_of([2] * 11 + [3]), plan_of(12, ranks, actor, critic, balance)
    arranged = arrange(batch, plan)
    chunks = arranged.chunk(ranks)
    for size, updates in ((actor, plan.actor), (critic, plan.critic)):
        parts = [rows_of_updates(chunk, updates) for chunk in chunks]
        assert len({len(rows) for part in parts for rows in part}) == 1
        for number in range(12 // size):
            uids = [
                u
                for chunk, part in zip(chunks, parts, strict=True)
                for u in chunk[part[number]].non_tensor_batch["uid"]
            ]
            assert set(uids) - {DUMMY_UID} == {
                f"p{p}" for p in range(number * size, (number + 1) * size)
            }
    kept = arranged.drop_dummies()
    assert sorted(kept.batch["row"].tolist()) == list(range(25))


def test_balancing_gives_ranks_about_as_many_tokens() -> None:
    batch = batch_of([2] * 12)
    tokens = {}
    for balance in (True, False):
        chunks = arrange(batch, plan_of(12, 2, 6, 6, balance)).chunk(2)
        tokens[balance] = [int(chunk.batch["attention_mask"].sum()) for chunk in chunks]
    assert abs(tokens[True][0] - tokens[True][1]) <= 2
    assert sum(tokens[True]) == sum(tokens[False])


@given(
    st.lists(st.integers(1, 6), min_size=8, max_size=8),
    st.sampled_from([1, 2, 3, 4]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_balancing_keeps_groups_on_one_rank_as_far_as_they_fit(
    rows: list[int], ranks: int, alike: bool
) -> None:
    rows = [rows[0]] * 8 if alike else rows
    chunks = arrange(batch_of(rows), plan_of(8, ranks, 4, 8)).chunk(ranks)
    homes: dict[str, set[int]] = {}
    for rank, chunk in enumerate(chunks):
        for uid in chunk.drop_dummies().non_tensor_batch["uid"]:
            homes.setdefault(uid, set()).add(rank)
    if alike and 4 % ranks == 0:
        assert all(len(home) == 1 for home in homes.values())
    # One group at most is taken apart for each rank that is filled up.
    assert sum(len(home) - 1 for home in homes.values()) <= 2 * ranks * max(rows).bit_length()
    assert sorted(
        row for chunk in chunks for row in chunk.drop_dummies().batch["row"].tolist()
    ) == list(range(sum(rows)))


def test_a_batch_that_needs_nothing_is_left_as_it_is() -> None:
    batch = batch_of([2] * 4)
    assert arrange(batch, plan_of(4, 1, 2, 4)) is batch


def test_groups_whose_rows_are_apart_are_brought_together_on_one_rank_too() -> None:
    batch = batch_of([2] * 4).select_idxs([0, 2, 4, 6, 1, 3, 5, 7])
    halves = arrange(batch, plan_of(4, 1, 2, 4)).chunk(2)
    assert [sorted(half.non_tensor_batch["uid"]) for half in halves] == [
        ["p0", "p0", "p1", "p1"],
        ["p2", "p2", "p3", "p3"],
    ]


def test_fewer_groups_than_planned_still_divide() -> None:
    """What dynamic sampling leaves may be less than a step."""
    arranged = arrange(batch_of([2, 2, 2]), plan_of(4, 2, 1, 2))
    assert len(arranged) % (4 * 2) == 0
    assert Counter(arranged.non_tensor_batch["uid"])["p0"] == 2


def test_shuffling_keeps_groups_together_and_every_epoch_has_all_rows() -> None:
    batch = batch_of([2] * 6)
    batch.meta_info = {"seed": 1, "global_steps": 3}
    parts = rows_of_updates(batch, UpdatePlan(mini_batches=3, epochs=2, shuffle=True))
    assert len(parts) == 6
    for epoch in (parts[:3], parts[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(12))
    orders = [torch.cat(parts[:3]).tolist(), torch.cat(parts[3:]).tolist()]
    assert orders[0] != orders[1]
    pairs = np.array(orders[0]).reshape(-1, 2)
    assert (pairs[:, 1] == pairs[:, 0] + 1).all()


def test_rows_that_do_not_divide_are_refused_with_the_fix() -> None:
    with pytest.raises(
        ValueError,
        match=r"25 rows do not divide into 2 mini-batches; arrange the batch by its plan",
    ):
        rows_of_updates(batch_of([25]), UpdatePlan(mini_batches=2))


def test_sizes_that_do_not_nest_are_refused_at_load() -> None:
    argv = [
        "data.train_batch_size=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "critic.ppo_mini_batch_size=4",
    ]
    with pytest.raises(
        ConfigError, match=r"ppo_mini_batch_size=6 and critic.ppo_mini_batch_size=4 do not nest"
    ):
        load_config(argv)


def test_without_a_critic_its_sizes_decide_nothing() -> None:
    argv = [
        "data.train_batch_size=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=6",
        "critic.ppo_mini_batch_size=4",
    ]
    config = load_config([*argv, "algorithm.adv_estimator=grpo"], check=False).config
    assert config.batch_plan.parts == 2
