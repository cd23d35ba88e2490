"""Tests the estimators that compare turns with continuations: by hand, and their weights."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.array_ops import object_array
from data.protocol import DataProto
from training import core_algos as algos
from training.advantage import compute_advantage

# Two episodes of one group: three turns that earn 1, 2, 4, and two that earn 8, 16.
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 0, 0]])
TURNS = torch.tensor([[0, 0, -1, 1, 2], [0, -1, 1, -1, -1]])
REWARDS = torch.tensor([[0.0, 1, 99, 2, 4], [8.0, 99, 16, 99, 99]], dtype=torch.float64)
GROUP = np.array(["a", "a"], dtype=object)
NOTHING: list[float] = []


def turn_credit(name: str, branch_returns: Any, **changed: Any) -> list[list[float]]:
    """Returns the one advantage of each turn's tokens, by episode."""
    offered = {
        "token_level_rewards": REWARDS,
        "response_mask": MASK,
        "turn_ids": TURNS,
        "index": GROUP,
        "branch_returns": branch_returns,
    }
    advantages, _ = algos.call_adv_estimator(name, **(offered | changed))
    mask = (changed.get("response_mask", MASK)).bool()
    turns = changed.get("turn_ids", TURNS)
    assert not advantages[~mask].any()
    rows = []
    for row, sampled, numbers in zip(advantages, mask, turns, strict=True):
        by_turn: dict[int, set[float]] = {}
        for number, value in zip(numbers[sampled].tolist(), row[sampled].tolist(), strict=True):
            by_turn.setdefault(number, set()).add(round(value, 12))
        assert all(len(values) == 1 for values in by_turn.values())
        rows.append([values.pop() for _, values in sorted(by_turn.items())])
    return rows


def test_vine_takes_the_difference_of_two_states_values() -> None:
    returns = [[[6.0, 8.0], [5.0], [1.0, 2.0, 3.0]], [[20.0], [10.0, 14.0]]]
    assert turn_credit("vine", returns) == [
        [1 + 5 - 7, 2 + 2 - 5, 4 + 0 - 2],
        [8 + 12 - 20, 16 + 0 - 12],
    ]
    config = SimpleNamespace(turn_gamma=0.5)
    assert turn_credit("vine", returns, config=config) == [
        [1 + 2.5 - 7, 2 + 1 - 5, 4 - 2],
        [8 + 6 - 20, 16 - 12],
    ]


def test_vine_shares_a_segments_advantage_and_compares_the_first_with_the_group() -> None:
    """Turn 1 of the first episode is branched alone; the returns of both episodes are 7 and 24."""
    returns = [[NOTHING, [3.0], NOTHING], [NOTHING, NOTHING]]
    assert turn_credit("vine", returns) == [[1 + 3 - 24, 2 + 4 - 3, 2 + 4 - 3], [24 - 7, 24 - 7]]
    alone = turn_credit("vine", returns, index=np.array(["a", "b"], dtype=object))
    assert alone == [[1 + 3, 2 + 4 - 3, 2 + 4 - 3], [24, 24]]


def test_vine_redraw_subtracts_the_redraws_and_leaves_out_what_has_none() -> None:
    returns = [[[1.0, 3.0], NOTHING, [4.0]], [NOTHING, [20.0]]]
    assert turn_credit("vine_redraw", returns) == [[7 - 2, 0, 4 - 4], [0, 16 - 20]]


def test_tree_grpo_compares_values_of_branches_with_their_siblings() -> None:
    """Values of a branch: its own rewards, and the mean of its children's.

    Episode 0 branches at turn 2: q there is 4, its sibling's 0, so that q at turn 0 is 3 + 2;
    episode 1 has 24 and is its root's other branch.
    """
    returns = [[NOTHING, NOTHING, [0.0]], [NOTHING, NOTHING]]
    assert turn_credit("tree_grpo", returns) == [[5 - 24, 5 - 24, 4 - 0], [24 - 5, 24 - 5]]
    by_std = turn_credit("tree_grpo", returns, divide_by_std=True, epsilon=0.0)
    std = np.std([5, 24], ddof=1)
    assert by_std[0] == pytest.approx([-19 / std, -19 / std, 4 / np.std([4, 0], ddof=1)])


def test_a_branch_that_is_trained_on_is_a_row_from_its_turn_on() -> None:
    """The second row branched off the first at turn 1, beside one more of 10."""
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 0, 0]])
    returns = [[NOTHING, [10.0, 16.0], NOTHING], [NOTHING, [6.0, 10.0]]]
    given_rows = {"response_mask": mask, "turn_ids": TURNS.masked_fill(mask == 0, -1)}
    # The first row's root is alone in its group: it keeps its q.
    q = 1 + (6 + 10 + 16) / 3
    assert turn_credit("tree_grpo", returns, **given_rows) == [
        pytest.approx([q, 6 - 13, 6 - 13]),
        [16 - 8],
    ]
    assert turn_credit("vine", returns, **given_rows) == [[1 + 13, 6 - 13, 6 - 13], [16 - 8]]


@pytest.mark.parametrize("name", ["vine", "vine_redraw", "tree_grpo"])
def test_weights_multiply_a_turns_advantage(name: str) -> None:
    returns = [[[6.0], [5.0], [1.0]], [[20.0], [10.0]]]
    plain = turn_credit(name, returns)
    weighted = turn_credit(name, returns, turn_weights=[[0.5, 0.0, 3.0], [1.0, 2.0]])
    expected = [[0.5, 0.0, 3.0], [1.0, 2.0]]
    for row, weights, found in zip(plain, expected, weighted, strict=True):
        assert found == [value * weight for value, weight in zip(row, weights, strict=True)]


@pytest.mark.parametrize("name", ["vine", "vine_redraw", "tree_grpo"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"branch_returns": [[NOTHING, [1.0]], [NOTHING] * 2]},
            "of episode 0 has 2 entries, and 3",
        ),
        ({"branch_returns": [[NOTHING] * 3]}, "has 1 entries for 2 episodes"),
        (
            {"branch_returns": [[NOTHING] * 3, [NOTHING, [1.0, float("nan")]]]},
            "turn 1 of episode 1 are .*nan.*: leave out continuations that failed",
        ),
        (
            {"branch_returns": [[NOTHING] * 3, [NOTHING, [1.0, None]]]},
            "turn 1 of episode 1 are .*None.*: leave out continuations that failed",
        ),
        ({"turn_weights": [[1.0] * 3, [1.0]]}, "turn_weights of episode 1 has 1 entries, and 2"),
    ],
)
def test_what_is_missing_or_no_number_is_named(name: str, changed: Any, message: str) -> None:
    returns = changed.get("branch_returns", [[NOTHING] * 3, [NOTHING] * 2])
    weights = {key: value for key, value in changed.items() if key == "turn_weights"}
    with pytest.raises(ValueError, match=message):
        turn_credit(name, returns, **weights)


def test_a_batch_without_continuations_is_refused_by_its_field() -> None:
    batch = DataProto.from_dict(
        tensors={"token_level_rewards": REWARDS, "response_mask": MASK, "turn_ids": TURNS},
        non_tensors={"uid": GROUP},
    )
    with pytest.raises(KeyError, match="estimator vine needs 'branch_returns'"):
        compute_advantage(batch, "vine")
    lists = [[[1.0]] * 3, [[2.0]] * 2]
    batch.non_tensor_batch["branch_returns"] = object_array(lists)
    plain = compute_advantage(batch, "vine").batch["advantages"].clone()
    batch.non_tensor_batch["turn_weights"] = object_array([[2.0] * 3, [2.0] * 2])
    assert torch.equal(compute_advantage(batch, "vine").batch["advantages"], 2 * plain)


# Weights


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_a_drawn_turn_weighs_what_all_turns_weigh_together(turns: int) -> None:
    drawn = np.array([algos.drawn_turn_weights(turns, turn) for turn in range(turns)])
    assert drawn.mean(0) == pytest.approx(np.ones(turns))
    chances = np.arange(1, turns + 1) / sum(range(1, turns + 1))
    weighted = [
        chance * np.array(algos.drawn_turn_weights(turns, turn, chance))
        for turn, chance in enumerate(chances)
    ]
    assert np.sum(weighted, axis=0) == pytest.approx(np.ones(turns))


@settings(deadline=None, max_examples=50)
@given(branches=st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_the_weights_of_a_tree_sum_to_one_at_every_depth(branches: list[int]) -> None:
    weights = algos.tree_weights(branches)
    for turn in range(len(branches)):
        paths = list(itertools.product(*[range(b) for b in branches[: turn + 1]]))
        assert sum(weights[turn] for _ in paths) == pytest.approx(1)


def test_an_episode_and_its_trained_continuations_weigh_one_at_every_turn() -> None:
    is_branched = [True, False, True, True]
    weights = algos.trained_continuation_weights(is_branched, samples=2)
    reached = [1 + 2, 1 + 2, 1 + 4, 1 + 6]
    assert weights == [1 / count for count in reached]
    assert algos.trained_continuation_weights(is_branched, samples=0) == [1.0] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: algos.drawn_turn_weights(3, 3), "turn 3 was drawn of an episode of 3 turns"),
        (lambda: algos.drawn_turn_weights(3, 0, 0.0), "with a chance of 0.0; allowed: above 0"),
        (lambda: algos.drawn_turn_weights(3, 0, float("nan")), "with a chance of nan"),
        (lambda: algos.tree_weights([2, 0]), "a state has at least 1"),
        (lambda: algos.trained_continuation_weights([True], -1), "samples=-1 must be 0 or more"),
    ],
)
def test_weights_refuse_what_cannot_be(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
