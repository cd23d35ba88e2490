"""Tests episodes of several rows in the estimators.

They see one joined row, however its parts lie in the batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data.array_ops import object_array
from data.protocol import DUMMY_UID, DataProto
from training.advantage import compute_advantage
from training.batch.dynamic_sampling import varied_groups
from training.batch.episode_rows import (
    EpisodeRows,
    group_keys,
    observation_mask,
    scores_on_trained_tokens,
)
from training.core_algos import compute_gae_advantage_return, register_adv_est
from training.core_algos.built_in import ESTIMATOR_NEEDS

WIDTH = 4
# What they whiten or scale by is of all groups, and a role is of several.
OF_THE_BATCH = {
    "gae",
    "turn_gae",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gdpo",
    "gpg",
    "rae",
}


def batch_of(
    rows: list[tuple[str, str, int, list[float]]], mask: list[list[int]] | None = None
) -> DataProto:
    """Rows as (uid, episode_id, episode_row, rewards); without `mask` every token was sampled."""
    rewards = torch.tensor([row[3] for row in rows])
    sampled = torch.ones_like(rewards, dtype=torch.long) if mask is None else torch.tensor(mask)
    columns = {
        "uid": object_array([row[0] for row in rows]),
        "episode_id": object_array([row[1] for row in rows]),
        "episode_row": np.array([row[2] for row in rows]),
    }
    return DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": sampled}, non_tensors=columns
    )


def test_a_conversation_that_goes_on_after_its_helpers_stands_behind_them() -> None:
    """Turns 0 and 3 are the main conversation's, 1 and 2 those of two helpers."""
    batch = batch_of(
        [
            ("g", "e0", 0, [1.0, 2.0, 7.0, 8.0]),
            ("g", "e0", 1, [3.0, 4.0, 0.0, 0.0]),
            ("g", "e0", 2, [5.0, 6.0, 0.0, 0.0]),
        ],
        mask=[[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]],
    )
    turns = [[0, 0, 3, 3], [1, 1, -1, -1], [2, 2, -1, -1]]
    batch.batch["turn_ids"] = torch.tensor(turns, dtype=torch.int16)
    episodes = EpisodeRows(batch)
    joined = episodes.join(batch.batch["token_level_rewards"])
    assert joined.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert torch.equal(episodes.split(joined), batch.batch["token_level_rewards"])


def test_rows_of_an_episode_stand_one_behind_the_other_in_their_order() -> None:
    batch = batch_of(
        [
            # An episode's second row may come first.
            ("g", "e1", 1, [5.0, 6.0]),
            ("g", "e0", 0, [1.0, 2.0]),
            ("g", "e1", 0, [3.0, 4.0]),
            ("g", "e2", 0, [7.0, 8.0]),
        ]
    )
    episodes = EpisodeRows(batch)
    assert episodes.rows == [[1], [2, 0], [3]]
    joined = episodes.join(batch.batch["token_level_rewards"])
    assert joined.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6], [7, 8, 0, 0]]
    assert torch.equal(episodes.split(joined), batch.batch["token_level_rewards"])
    assert episodes.join(torch.tensor([10.0, 11.0, 12.0, 13.0])).tolist() == [11, 12, 13], (
        "a row's number: the first row's"
    )
    assert episodes.first.tolist() == [1, 2, 3]


def two_agents(rewards: list[tuple[str, str, float]]) -> DataProto:
    """Rows as (episode, agent, reward), one group."""
    batch = batch_of([("g", episode, 0, [reward, 0.0]) for episode, _, reward in rewards])
    names = [agent for _, agent, _ in rewards]
    batch.non_tensor_batch["agent_role"] = object_array([f"env/{name}" for name in names])
    batch.non_tensor_batch["agent_conversation"] = object_array([f"{name}/1" for name in names])
    batch.non_tensor_batch["data_source"] = object_array(["env"] * len(names))
    return batch


def test_agents_of_an_episode_are_compared_with_their_like() -> None:
    """Solvers earn 1 and 3, critics 10 and 14: each against its role's mean of two."""
    batch = two_agents(
        [("e0", "solver", 1.0), ("e0", "critic", 10.0), ("e1", "solver", 3.0), ("e1", "critic", 14)]
    )
    assert EpisodeRows(batch).rows == [[0], [1], [2], [3]]
    assert EpisodeRows(batch).first_by_group == {"g": [0, 1, 2, 3]}
    assert EpisodeRows(batch).first_by_role == {"g env/solver": [0, 2], "g env/critic": [1, 3]}
    done = advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert done.batch["advantages"][:, 0].tolist() == [-1.0, -2.0, 1.0, 2.0]


def test_a_group_is_kept_where_one_of_its_roles_differs() -> None:
    """Critics always earn more than solvers, which alone is nothing to learn from."""
    alike = [("e0", "solver", 1.0), ("e0", "critic", 2.0), ("e1", "solver", 1.0)]
    for last, kept in ((2.0, []), (3.0, ["g"])):
        batch = two_agents([*alike, ("e1", "critic", last)])
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"]
        assert varied_groups(batch, "seq_reward")[0] == kept


def test_a_dummy_keeps_the_uid_that_tells_it_apart() -> None:
    batch = two_agents([("e0", "solver", 1.0), ("e1", "solver", 2.0)])
    padded = batch.select_or_dummies([0, 1, 2])
    assert group_keys(padded).tolist() == ["g env/solver", "g env/solver", DUMMY_UID]


def test_a_batch_of_one_row_each_is_left_as_it_is() -> None:
    batch = batch_of([("g", "e0", 0, [1.0, 2.0]), ("g", "e1", 0, [3.0, 4.0])])
    episodes, tensor = EpisodeRows(batch), torch.rand(2, 2)
    assert episodes.can_join(torch.rand(2, 7, 7), width=2)
    assert episodes.join(tensor) is tensor
    assert episodes.split(tensor) is tensor


def test_every_dummy_is_an_episode_of_its_own() -> None:
    batch = batch_of(
        [("g", "e0", 0, [1.0]), ("g", "e0", 1, [2.0]), ("g", "e1", 0, [3.0])]
    ).pad_with_dummies(5)
    assert batch.non_tensor_batch["uid"].tolist()[3:] == [DUMMY_UID] * 2
    assert EpisodeRows(batch).rows == [[0, 1], [2], [3], [4]]


def test_without_episode_ids_every_row_is_an_episode() -> None:
    assert EpisodeRows(DataProto.from_dict(tensors={"x": torch.zeros(3, 1)})).rows == [
        [0],
        [1],
        [2],
    ]


def advantages(batch: DataProto, estimator: str, **kwargs: float) -> DataProto:
    return compute_advantage(
        batch, estimator, config=SimpleNamespace(gamma=kwargs.get("gamma", 1.0)), **kwargs
    )


def test_a_group_counts_an_episode_of_two_rows_once() -> None:
    """Compares scores 3 (1 + 2, in two rows), 1 and 2 to their mean 2; by rows it would be 1.5."""
    batch = batch_of(
        [("g", "a", 0, [1.0]), ("g", "b", 0, [1.0]), ("g", "a", 1, [2.0]), ("g", "c", 0, [2.0])]
    )
    advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert batch.batch["advantages"].tolist() == [[1], [-1], [1], [0]]
    advantages(batch, "grpo")
    torch.testing.assert_close(
        batch.batch["advantages"], torch.tensor([[1.0], [-1.0], [1.0], [0.0]]), atol=1e-5, rtol=0
    )
    # 3 - (1 + 2)/2, 1 - (3 + 2)/2, 2 - (3 + 1)/2.
    advantages(batch, "rloo")
    torch.testing.assert_close(
        batch.batch["advantages"], torch.tensor([[1.5], [-1.5], [1.5], [0.0]])
    )


def test_a_reward_in_the_last_row_reaches_back_into_the_first() -> None:
    batch = batch_of(
        [("g", "a", 0, [0.0, 0.0]), ("g", "a", 1, [0.0, 1.0]), ("g", "b", 0, [0.0, 0.5])]
    )
    batch.batch["values"] = torch.zeros(3, 2)
    advantages(batch, "gae", gamma=0.5, lam=1.0)
    assert batch.batch["returns"].tolist() == [[0.125, 0.25], [0.5, 1.0], [0.25, 0.5]]


@st.composite
def episodes(draw: st.DrawFn) -> list[list[list[tuple[int, float, float]]]]:
    """Draws two to five episodes of one to three rows of WIDTH (mask, reward, value)."""
    number = st.floats(-2, 2, width=32)
    token = st.tuples(st.integers(0, 1), number, number)
    row = st.lists(token, min_size=WIDTH, max_size=WIDTH)
    return draw(st.lists(st.lists(row, min_size=1, max_size=3), min_size=2, max_size=5))


def tensor_of(rows: list[list[tuple[int, float, float]]], field: int) -> Tensor:
    return torch.tensor(
        [[token[field] for token in row] for row in rows], dtype=torch.long if field == 0 else None
    )


def branched(number: int, turns: int) -> list[list[float]]:
    """Returns of continuations, of every other turn of an episode, and other ones of the next."""
    return [[turn / 4, number / 2] if (turn + number) % 2 else [] for turn in range(turns)]


def as_batch(
    rows: list[list[tuple[int, float, float]]], uids: list[str], ids: list[str], order: list[int]
) -> DataProto:
    """Makes all that estimators read.

    A turn is two places of the whole episode, of which a row is a part.
    """
    mask, rewards, values = (tensor_of(rows, field) for field in range(3))
    places = torch.tensor(order)[:, None] * WIDTH + torch.arange(mask.shape[1])
    return DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_rewards": rewards * mask,
            "values": values * mask,
            "turn_ids": torch.where(mask > 0, places // 2, -1),
            "old_log_probs": -values.abs(),
            "ref_log_prob": -rewards.abs(),
            "sum_pi_squared": values.abs() / 2,
            "reward_baselines": torch.tensor([float(name) for name in ids]),
        },
        non_tensors={
            "uid": object_array(uids),
            "episode_id": object_array(ids),
            "episode_row": np.array(order),
            "role": object_array([f"role {int(name) % 2}" for name in ids]),
            "anchors": object_array(
                [[f"{int(name) * turn % 3}" for turn in range(3 * WIDTH)] for name in ids]
            ),
            "branch_returns": object_array([branched(int(name), 3 * WIDTH) for name in ids]),
        },
    )


SETTINGS = SimpleNamespace(
    gamma=0.9,
    turn_gamma=0.8,
    turn_lam=0.7,
    gigpo_step_weight=0.5,
    distillation_coef=1.0,
    distillation_task="rloo",
    gdpo_reward_keys=(),
    gdpo_reward_weights=(),
)


# One counts columns, in which what lies between sampled tokens has places; its multi-turn form does
# not.
@pytest.mark.seconds
@pytest.mark.parametrize("estimator", sorted(ESTIMATOR_NEEDS.keys() - {"optimal_token_baseline"}))
@settings(max_examples=25, deadline=None)
@given(told=episodes(), seed=st.integers(0, 10**6))
def test_split_episodes_have_the_advantages_of_the_same_episodes_in_one_row(
    estimator, told, seed
) -> None:
    longest = max(map(len, told)) * WIDTH
    # grpo_passk refuses groups of one.
    groups = 1 if estimator == "grpo_passk" else 2
    whole_rows = [[token for row in rows for token in row] for rows in told]
    whole = as_batch(
        [row + [(0, 0.0, 0.0)] * (longest - len(row)) for row in whole_rows],
        [f"g{i % groups}" for i in range(len(told))],
        [str(i) for i in range(len(told))],
        [0] * len(told),
    )
    owners = [(i, k) for i, rows in enumerate(told) for k in range(len(rows))]
    shuffled = [owners[j] for j in np.random.default_rng(seed).permutation(len(owners))]
    split = as_batch(
        [told[i][k] for i, k in shuffled],
        [f"g{i % groups}" for i, _ in shuffled],
        [str(i) for i, _ in shuffled],
        [k for _, k in shuffled],
    )
    if len(split) % 3:
        split = split.pad_with_dummies(3)
    for batch in (whole, split):
        compute_advantage(batch, estimator, gamma=0.9, lam=0.8, config=SETTINGS)
    for name in ("advantages", "returns"):
        for row, (i, k) in enumerate(shuffled):
            expected = whole.batch[name][i][k * WIDTH : (k + 1) * WIDTH]
            torch.testing.assert_close(split.batch[name][row], expected, atol=1e-4, rtol=1e-4)
        assert not split.batch[name][len(shuffled) :].any(), "nothing is learnt from dummies"


def test_the_one_that_counts_columns_counts_sampled_tokens_in_a_group_of_split_episodes() -> None:
    """Group g has an episode of two rows; group h has none, so that its holes have places."""
    rows = [
        [(1, 0.0, 0.5), (0, 0.0, 0.25), (1, 1.0, 0.75), (0, 0.0, 0.0)],
        [(1, 0.5, 0.25), (1, 0.0, 0.5), (1, 2.0, 0.125), (0, 0.0, 0.0)],
    ]
    batch = as_batch(
        [*rows, rows[0], *rows],
        ["g", "g", "g", "h", "h"],
        ["0", "1", "1", "2", "3"],
        [0, 0, 1, 0, 0],
    )
    seen = []
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        compute_advantage(batch, name, config=SETTINGS)
        seen.append(batch.batch["advantages"])
    assert torch.equal(seen[0][:3], seen[1][:3])
    assert not torch.equal(seen[0][3:], seen[1][3:])


@pytest.mark.parametrize("estimator", sorted(ESTIMATOR_NEEDS.keys() - OF_THE_BATCH))
def test_a_group_does_not_see_that_another_groups_episodes_have_several_rows(
    estimator: str,
) -> None:
    """Its own episodes have one row each, with holes: places that one estimator counts."""
    rows = [
        [(1, 0.0, 0.5), (0, 0.0, 0.25), (1, 1.0, 0.75), (0, 0.0, 0.0)],
        [(0, 0.0, 0.0), (1, 0.5, 0.25), (1, 0.0, 0.5), (1, 2.0, 0.125)],
        [(1, 0.0, 0.5), (1, 0.0, 0.25), (0, 0.0, 0.0), (1, -1.0, 0.25)],
    ]
    # With three such rows an episode has as many tokens as those of the first group.
    other = [(0, 0.0, 0.5), (0, 0.0, 0.25), (0, 0.0, 0.0), (1, 2.0, 0.5)]
    seen = []
    for last_row in ([("4", 0)], [("4", 0), ("4", 1)], [("4", 0), ("4", 1), ("4", 2)]):
        owners = [("1", 0), ("2", 0), ("3", 0), ("5", 0), *last_row]
        batch = as_batch(
            [*rows, *[other] * (len(owners) - 3)],
            ["g"] * 3 + ["h"] * (len(owners) - 3),
            [episode for episode, _ in owners],
            [number for _, number in owners],
        )
        compute_advantage(batch, estimator, gamma=0.9, lam=0.8, config=SETTINGS)
        seen.append(batch.batch["advantages"][:3])
    assert seen[0].any()
    for advantages_of_group in seen[1:]:
        torch.testing.assert_close(advantages_of_group, seen[0], atol=1e-6, rtol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Measures the most entries that a tensor's memory has."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return out


# It looks at each token alone; the estimator that it adds may be a user's.
@pytest.mark.parametrize("estimator", sorted(ESTIMATOR_NEEDS.keys() - {"on_policy_distillation"}))
def test_an_episode_of_many_rows_does_not_make_the_others_as_wide(estimator: str) -> None:
    """Takes 60 episodes of which one has 41 rows.

    Lines of its length would have 25 times the batch's places.
    """
    ids = [str(i) for i in range(60)] + ["0"] * 40
    token = np.random.default_rng(0).normal(size=(100, WIDTH, 2)).round(2)
    rows = [[(1, float(reward), float(value)) for reward, value in row] for row in token]
    batch = as_batch(
        rows, [f"g{int(name) // 2}" for name in ids], ids, [0] * 60 + list(range(1, 41))
    )
    batch.non_tensor_batch["anchors"] = object_array(
        [["start"] * WIDTH * (1 if int(name) else 41) for name in ids]
    )
    batch.non_tensor_batch["branch_returns"] = object_array(
        [branched(1, WIDTH * (1 if int(name) else 41)) for name in ids]
    )
    with LargestTensor() as seen:
        compute_advantage(batch, estimator, gamma=0.9, lam=0.8, config=SETTINGS)
    assert seen.entries <= 4 * 100 * WIDTH


def with_a_helper() -> DataProto:
    """Turns 0 and 2 of episode 0 are its first row's, turn 1 a helper's; turn 2 is paid 1."""
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    zeros = torch.zeros(3, 4)
    rewards = zeros.clone()
    rewards[0, 3] = 1.0
    return DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "turn_ids": torch.tensor([[0, 0, -1, 2], [1, 1, -1, -1], [0, 0, 0, -1]]),
            "token_level_rewards": rewards,
            "values": zeros,
            "old_log_probs": zeros - 1,
            "ref_log_prob": zeros - 1,
            "sum_pi_squared": zeros + 0.3,
            "reward_baselines": torch.zeros(3),
        },
        non_tensors={
            "uid": object_array(["g"] * 3),
            "episode_id": object_array(["0", "0", "1"]),
            "episode_row": np.array([0, 1, 0]),
            "anchors": object_array([["a", "b", "c"]] * 3),
        },
    )


@pytest.mark.parametrize(
    "estimator",
    [
        "gae",
        "turn_gae",
        "reinforce_plus_plus",
        "remax",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
        "turn_return",
        "gigpo",
    ],
)
def test_a_helpers_turn_has_the_return_of_what_came_after_it(estimator: str) -> None:
    config = SimpleNamespace(gamma=1.0, turn_gamma=1.0, turn_lam=1.0, gigpo_step_weight=1.0)
    batch = compute_advantage(with_a_helper(), estimator, config=config)
    returns = batch.batch["returns"]
    assert returns[0].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert returns[1].tolist() == [1.0, 1.0, 0.0, 0.0]


def test_a_helpers_turn_is_discounted_by_the_tokens_between_it_and_the_reward() -> None:
    """The line is 0 0 1 1 2: with gamma 0.5 the helper's last token is one token from the end."""
    batch = compute_advantage(with_a_helper(), "gae", gamma=0.5, config=SETTINGS)
    assert batch.batch["returns"][1].tolist() == [0.25, 0.5, 0.0, 0.0]
    assert batch.batch["returns"][0].tolist() == [0.0625, 0.125, 0.0, 1.0]


def test_the_score_of_a_row_that_is_left_out_goes_to_the_turn_before_it() -> None:
    """The helper's turn 1 is paid 0.5 and left out: turn 0 has it then, turn 2 keeps its 1."""
    batch = with_a_helper()
    scores = batch.batch["token_level_rewards"].clone()
    scores[1, 1] = 0.5
    batch.batch["response_mask"][1] = 0
    moved = scores_on_trained_tokens(batch, scores)
    assert moved.tolist() == [[0.0, 0.5, 0.0, 1.0], [0.0] * 4, [0.0] * 4]
    batch.batch["response_mask"][0, :2] = 0
    moved = scores_on_trained_tokens(batch, scores)
    assert moved[0].tolist() == [0.0, 0.0, 0.0, 1.5], "nothing is left before it"
    batch.batch["response_mask"][0] = 0
    assert not scores_on_trained_tokens(batch, scores).any(), "nor anything of the episode"


def test_a_winner_that_loses_its_last_row_is_still_the_best_of_its_group() -> None:
    batch = batch_of(
        [("g", "a", 0, [0.0]), ("g", "a", 1, [1.0]), ("g", "b", 0, [0.5]), ("g", "c", 0, [0.0])]
    )
    batch.batch["response_mask"][1] = 0
    scores = batch.batch["token_level_rewards"]
    batch.batch["token_level_rewards"] = scores_on_trained_tokens(batch, scores)
    advantages(batch, "grpo", norm_adv_by_std_in_grpo=False)
    assert batch.batch["advantages"].flatten().tolist() == [0.5, 0.0, 0.0, -0.5]


@pytest.mark.seconds
@settings(max_examples=50, deadline=None)
@given(told=episodes(), seed=st.integers(0, 10**6))
def test_no_rejection_changes_the_score_of_an_episode_that_has_a_token_left(told, seed) -> None:
    owners = [(i, k) for i, rows in enumerate(told) for k in range(len(rows))]
    order = np.random.default_rng(seed)
    owners = [owners[j] for j in order.permutation(len(owners))]
    batch = as_batch(
        [told[i][k] for i, k in owners],
        ["g"] * len(owners),
        [str(i) for i, _ in owners],
        [k for _, k in owners],
    )
    scores = batch.batch["token_level_rewards"]
    before = EpisodeRows(batch).totals(scores)
    kept = torch.from_numpy(order.random(scores.shape) < 0.3)
    batch.batch["response_mask"] = batch.batch["response_mask"] * kept
    moved = scores_on_trained_tokens(batch, scores)
    is_sampled = batch.batch["response_mask"].bool()
    assert not moved[~is_sampled].any()
    episodes = EpisodeRows(batch)
    expected = torch.where(episodes.lengths > 0, before, 0)
    torch.testing.assert_close(episodes.totals(moved), expected, atol=1e-5, rtol=1e-5)


def test_what_is_said_of_an_answer_is_read_from_the_row_of_the_last_turn() -> None:
    """Episode 0 began in row 0 and ended there; its helper's row comes between."""
    batch = with_a_helper()
    batch.non_tensor_batch["reward_info/acc"] = object_array([1.0, None, 0.5])
    batch.non_tensor_batch["ending"] = object_array(["done", "done", "overflow"])
    episodes = EpisodeRows(batch)
    assert episodes.rows == [[0, 1], [2]]
    assert episodes.last.tolist() == [0, 2]
    assert episodes.column("reward_info/acc").tolist() == [1.0, 0.5]
    assert episodes.column("ending").tolist() == ["done", "overflow"]
    batch.batch["turn_ids"][1, :2] = 3
    episodes = EpisodeRows(batch)
    assert episodes.last.tolist() == [1, 2], "now the helper spoke last"
    assert episodes.column("reward_info/acc").tolist() == [None, 0.5]


def test_the_last_turn_is_the_last_whatever_a_correction_has_left_out() -> None:
    batch = batch_of([("g", "a", 0, [0.0, 0.0]), ("g", "a", 1, [0.0, 1.0])])
    batch.batch["turn_ids"] = torch.tensor([[0, 0], [1, 1]])
    batch.batch["response_mask"] = torch.tensor([[1, 1], [0, 0]])
    assert EpisodeRows(batch).last.tolist() == [1]
    batch.batch["turn_ids"][:] = -1
    assert EpisodeRows(batch).last.tolist() == [1], "a failed episode's turns are not known"


def test_gdpo_compares_what_the_reward_function_said_of_the_last_row() -> None:
    batch = batch_of(
        [("g", "a", 0, [0.0]), ("g", "a", 1, [1.0]), ("g", "b", 0, [0.0]), ("g", "b", 1, [0.0])]
    )
    batch.batch["turn_ids"] = torch.tensor([[0], [1], [0], [1]])
    batch.non_tensor_batch["reward_info/acc"] = object_array([None, 1.0, None, 0.0])
    config = SimpleNamespace(gdpo_reward_keys=("acc",), gdpo_reward_weights=())
    compute_advantage(batch, "gdpo", config=config)
    assert batch.batch["advantages"].sign().flatten().tolist() == [1, 1, -1, -1]


def test_an_estimator_of_ones_own_reads_what_was_said_of_the_last_row() -> None:
    seen = []

    @register_adv_est("reads_acc")
    def reads_acc(token_level_rewards, response_mask, non_tensor_batch):
        seen.append(non_tensor_batch["acc"].tolist())
        return token_level_rewards, token_level_rewards

    batch = with_a_helper()
    batch.non_tensor_batch["reward_info/acc"] = object_array([1.0, 0.25, 0.5])
    compute_advantage(batch, "reads_acc")
    assert seen == [[1.0, 0.5]]


def test_an_estimator_of_ones_own_sees_the_turns_in_their_order() -> None:
    seen = []

    @register_adv_est("sees_lines", span="episodes")
    def sees_lines(token_level_rewards, response_mask):
        seen.append(token_level_rewards.tolist())
        return token_level_rewards, token_level_rewards

    batch = with_a_helper()
    batch.batch["token_level_rewards"][1, 0] = 0.5
    compute_advantage(batch, "sees_lines")
    assert [[0.0, 0.0, 0.5, 0.0, 1.0]] in seen
    assert batch.batch["returns"][1].tolist() == [0.5, 0.0, 0.0, 0.0]


def test_whitening_is_over_the_episodes_of_all_lengths() -> None:
    batch = batch_of(
        [("g", "a", 0, [3.0, 0.0]), ("g", "a", 1, [1.0, 2.0]), ("g", "b", 0, [1.0, 0.0])]
    )
    for estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"):
        advantages(batch, estimator) if estimator != "gdpo" else compute_advantage(
            batch, estimator, config=SETTINGS
        )
        found = batch.batch["advantages"]
        assert abs(float(found.mean())) < 1e-6 and float(found.std()) == pytest.approx(
            1, abs=1e-5
        ), estimator


def test_gae_over_joined_rows_is_gae_over_their_sampled_tokens() -> None:
    """Works by hand [r=0 v=.5] [pad] | [r=1 v=.25] with gamma .5, lam 1.

    The padding between rows takes no time.
    """
    batch = batch_of([("g", "a", 0, [0.0, 0.0]), ("g", "a", 1, [1.0, 0.0])], mask=[[1, 0], [1, 0]])
    batch.batch["values"] = torch.tensor([[0.5, 0.0], [0.25, 0.0]])
    episodes = EpisodeRows(batch)
    joined = [
        episodes.join(batch.batch[name])
        for name in ("token_level_rewards", "values", "response_mask")
    ]
    raw, returns = compute_gae_advantage_return(*joined, 0.5, 1.0, whiten=False)
    assert raw.tolist() == [[0.0, 0.75]], "0 + .5 x .25 - .5 + .5 x .75 = 0, 1 - .25 = .75"
    assert returns.tolist() == [[0.5, 1.0]]


def test_a_batch_of_prompts_needs_no_anchors_and_no_weights() -> None:
    """Each prompt's answers begin in the same state, so that GiGPO compares them twice."""
    batch = batch_of([("g", "a", 0, [3.0]), ("g", "b", 0, [1.0])])
    config = SimpleNamespace(turn_gamma=1.0, turn_lam=1.0, gigpo_step_weight=1.0)
    compute_advantage(batch, "gigpo", norm_adv_by_std_in_grpo=False, config=config)
    assert batch.batch["advantages"].tolist() == [[2], [-2]]


def test_observations_of_episodes_that_are_left_out_are_not_predicted() -> None:
    tensors = {
        "responses": torch.zeros(2, 3, dtype=torch.int32),
        "attention_mask": torch.ones(2, 4, dtype=torch.int8),
        "turn_ids": torch.tensor([[0, -1, 1], [-1, -1, -1]], dtype=torch.int16),
    }
    assert observation_mask(DataProto.from_dict(tensors=tensors)).tolist() == [[0, 1, 0], [0, 0, 0]]
