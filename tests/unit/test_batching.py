"""Tests partitions, dynamic batches and the plan of an update.

Each row once, budgets kept, little padding.
"""

from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.protocol import DataProto
from training.batch.micro_batches import (
    get_reverse_idx,
    plan_padded,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from training.batch.rank_layout import (
    ceildiv,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
    roundup_divisible,
)
from training.batch.row_groups import shuffled_groups
from training.config import MicroBatching, UpdatePlan

lengths_lists = st.lists(st.integers(0, 60), min_size=1, max_size=24)


def spread(partitions, lengths):
    sums = [sum(lengths[i] for i in part) for part in partitions]
    return max(sums) - min(sums)


@given(lengths_lists, st.data())
@settings(max_examples=60, deadline=None)
def test_partitions_hold_every_row_once_and_are_not_empty(lengths, data):
    k = data.draw(st.integers(1, len(lengths)))
    partitions = get_seqlen_balanced_partitions(lengths, k, equal_size=False)
    assert len(partitions) == k and all(partitions)
    assert sorted(chain.from_iterable(partitions)) == list(range(len(lengths)))
    # Any differencing keeps the spread within the longest row.
    assert spread(partitions, lengths) <= max(lengths)


@pytest.mark.seconds
@given(st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_equal_size_partitions_have_the_same_number_of_rows(k, size, random):
    lengths = [random.randint(1, 50) for _ in range(k * size)]
    partitions = get_seqlen_balanced_partitions(lengths, k, equal_size=True)
    assert [len(part) for part in partitions] == [size] * k
    assert sorted(chain.from_iterable(partitions)) == list(range(k * size))
    assert spread(partitions, lengths) <= max(lengths)


def test_two_way_differencing_of_the_textbook_example():
    # 8, 7, 6, 5, 4: 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2, a difference of 2; greedy filling
    # ends with 4.
    partitions = get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, equal_size=False)
    assert spread(partitions, [8, 7, 6, 5, 4]) == 2


def test_partitions_are_close_to_the_best_by_brute_force():
    lengths = [31, 27, 22, 18, 14, 11, 7, 3]
    best = min(
        spread([half, set(range(8)) - set(half)], lengths)
        for n in range(1, 8)
        for half in combinations(range(8), n)
    )
    assert spread(get_seqlen_balanced_partitions(lengths, 2, equal_size=False), lengths) <= best + 4


def test_impossible_partitions_are_refused():
    with pytest.raises(ValueError, match="cannot cut 2 rows into 3"):
        get_seqlen_balanced_partitions([1, 2], 3, equal_size=False)
    with pytest.raises(ValueError, match="3 rows do not divide into 2 partitions"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)


def test_unbalance_is_reported_before_and_after():
    assert log_seqlen_unbalance([10, 8, 2, 1], [[0, 3], [1, 2]], "seqlen") == {
        "seqlen/min": 3,
        "seqlen/max": 18,
        "seqlen/minmax_diff": 15,
        "seqlen/balanced_min": 10,
        "seqlen/balanced_max": 11,
        "seqlen/mean": 10.5,
    }


def dynamic_data(lengths):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict(tensors={"attention_mask": mask, "row": torch.arange(len(lengths))})


@pytest.mark.parametrize("budget", [10, 13, 100])
def test_dynamic_batches_keep_the_budget_and_are_restored_in_order(budget):
    lengths = [3, 10, 4, 9, 1, 1, 7]
    micro_batches, rows = prepare_dynamic_batch(dynamic_data(lengths), budget)
    assert all(micro_batch.batch["attention_mask"].sum() <= budget for micro_batch in micro_batches)
    assert len(micro_batches) >= ceildiv(sum(lengths), budget)
    results = torch.cat([micro_batch.batch["row"] * 10 for micro_batch in micro_batches])
    assert restore_dynamic_batch(results, rows).tolist() == [0, 10, 20, 30, 40, 50, 60]


def test_dynamic_batches_refuse_a_row_above_the_budget_and_obey_the_minimum():
    batch = dynamic_data([3, 10]).batch
    with pytest.raises(ValueError, match="a row has 10 tokens, above max_token_len=9"):
        rearrange_micro_batches(batch, 9)
    assert len(rearrange_micro_batches(batch, 100)[0]) == 1
    assert len(rearrange_micro_batches(batch, 100, min_num_micro_batch=2)[0]) == 2


def test_reverse_index_undoes_a_permutation_and_rounding_rounds_up():
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]
    assert [ceildiv(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [roundup_divisible(a, 4) for a in (0, 1, 4, 5)] == [0, 4, 4, 8]


# The plan of padded rows


def padded_tokens(micro_batch, lengths):
    return len(micro_batch) * max(lengths[row] for row in micro_batch)


@pytest.mark.seconds
@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(5, 80))
@settings(max_examples=200, deadline=None)
def test_token_plan_holds_every_row_once_within_the_budget(lengths, budget):
    micro_batches = plan_padded(lengths, MicroBatching(max_token_len=budget))
    assert sorted(chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    sizes = [padded_tokens(micro_batch, lengths) for micro_batch in micro_batches]
    assert all(
        size <= budget or len(micro) == 1 for size, micro in zip(sizes, micro_batches, strict=True)
    )
    assert sizes == sorted(sizes, reverse=True)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_row_plan_holds_every_row_once_within_the_size(lengths, size):
    micro_batches = plan_padded(lengths, MicroBatching(micro_batch_size=size))
    assert sorted(chain.from_iterable(micro_batches)) == list(range(len(lengths)))
    assert all(1 <= len(part) <= size for part in micro_batches)
    assert len(micro_batches) == ceildiv(len(lengths), size)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.integers(20, 50))
@settings(max_examples=60, deadline=None)
def test_plan_has_the_fewest_micro_batches_and_then_the_least_padding(lengths, budget):
    """Compares with every way of cutting the sorted rows."""
    rows, ordered = len(lengths), sorted(lengths, reverse=True)

    def cost(cuts):
        parts = [ordered[a:b] for a, b in zip((0, *cuts), (*cuts, rows), strict=True)]
        padded = [len(part) * part[0] for part in parts]
        return (len(parts), sum(padded)) if max(padded) <= budget else (rows + 1, 0)

    best = min(cost(cuts) for n in range(rows) for cuts in combinations(range(1, rows), n))
    micro_batches = plan_padded(lengths, MicroBatching(max_token_len=budget))
    assert (len(micro_batches), sum(padded_tokens(m, lengths) for m in micro_batches)) == best


def test_the_documented_example():
    assert plan_padded([16, 18], MicroBatching(max_token_len=40)) == [[1, 0]]
    assert plan_padded([16, 18], MicroBatching(max_token_len=35)) == [[1], [0]]


def test_mini_batches_divide_the_rows_or_are_refused():
    assert UpdatePlan.of_rows(6, 2, epochs=2).updates == 6
    with pytest.raises(
        ValueError, match=r"6 rows .* mini-batches of 4; choose a ppo_mini_batch_size that divides"
    ):
        UpdatePlan.of_rows(6, 4)


def test_shuffling_permutes_groups_and_keeps_their_rows_together():
    uids = np.array([*list("aabbccddee"), "a"], dtype=object)
    order = shuffled_groups(uids, torch.Generator().manual_seed(1)).tolist()
    assert sorted(order) == list(range(11)) and order != list(range(11))
    groups = [uids[row] for row in order]
    assert sum(a != b for a, b in pairwise(groups)) == 4
    assert [row for row in order if uids[row] == "a"] == [0, 1, 10]


def test_shuffling_depends_on_the_seed_and_not_on_what_the_uids_are():
    def shuffled(uids, seed):
        return shuffled_groups(uids, torch.Generator().manual_seed(seed)).tolist()

    assert shuffled("xxyyzz", 3) == shuffled("zzaamm", 3)
    assert len({tuple(shuffled("aabbccdd", seed)) for seed in range(8)}) > 1
