"""The credit of an episode of two contexts, by hand: it counts once, its turns keep their order.

episode 0    row 0   a0 a1 e  q  s0 s1     a: turn 0, s: the summary, turn 1
             row 1   b0 b1                 b: turn 2, of the next context
episode 1    row 2   c0 c1
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from data.array_ops import object_array
from data.protocol import DataProto
from training.advantage import compute_advantage
from training.batch.episode_rows import EpisodeRows
from training.config import AlgorithmConfig

TURN_IDS = [[0, 0, -1, -1, 1, 1], [2, 2, -1, -1, -1, -1], [0, 0, -1, -1, -1, -1]]
REWARDS = [[0, 0.25, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0.5, 0, 0, 0, 0]]
VALUES = [[0.1, 0.2, 9, 9, 0.3, 0.4], [0.5, 0.6, 9, 9, 9, 9], [0.7, 0.8, 9, 9, 9, 9]]
GAMMA = 0.9
LAM = 0.8
TOKENS = 8


def batch_of(trains_summaries: bool = True) -> DataProto:
    turn_ids = torch.tensor(TURN_IDS)
    if not trains_summaries:
        turn_ids = torch.where(turn_ids == 1, -1, turn_ids)
    return DataProto.from_dict(
        tensors={
            "responses": torch.ones(3, 6, dtype=torch.long),
            "response_mask": (turn_ids >= 0).to(torch.int8),
            "turn_ids": turn_ids.to(torch.int16),
            "token_level_rewards": torch.tensor(REWARDS, dtype=torch.float32),
            "values": torch.tensor(VALUES),
        },
        non_tensors={
            "uid": object_array(["g", "g", "g"]),
            "episode_id": object_array(["g.0", "g.0", "g.1"]),
            "episode_row": np.array([0, 1, 0]),
            "anchors": object_array([["start", "summary room", "room"]] * 2 + [["start"]]),
        },
    )


def advantages_of(name: str, batch: DataProto, **settings: float) -> tuple[list[float], ...]:
    """Returns the advantages of the two episodes' sampled tokens, in the order of turns."""
    config = AlgorithmConfig(gamma=settings.get("gamma", 1.0))
    done = compute_advantage(batch, name, config=config, **settings)
    mask = done.batch["response_mask"].bool()
    advantages = done.batch["advantages"]
    assert not advantages[~mask].any()
    first = [*advantages[0][mask[0]].tolist(), *advantages[1][mask[1]].tolist()]
    return first, advantages[2][mask[2]].tolist()


def whitened(*lines: list[float]) -> tuple[list[float], ...]:
    every = [value for line in lines for value in line]
    mean = sum(every) / len(every)
    variance = sum((value - mean) ** 2 for value in every) / (len(every) - 1)
    return tuple([(value - mean) / math.sqrt(variance + 1e-8) for value in line] for line in lines)


def gae(rewards: list[float], values: list[float]) -> list[float]:
    advantages = [0.0] * len(rewards)
    following = next_value = 0.0
    for place in reversed(range(len(rewards))):
        delta = rewards[place] + GAMMA * next_value - values[place]
        following = delta + GAMMA * LAM * following
        next_value = values[place]
        advantages[place] = following
    return advantages


def discounted(rewards: list[float]) -> list[float]:
    return [
        sum(GAMMA**later * reward for later, reward in enumerate(rewards[place:]))
        for place in range(len(rewards))
    ]


def test_grpo_counts_an_episode_once_whatever_its_contexts() -> None:
    first, second = advantages_of("grpo", batch_of())
    # Scores 1.25 and 0.5; their deviation by n - 1.
    mean = 0.875
    std = math.sqrt((1.25 - mean) ** 2 + (0.5 - mean) ** 2)
    assert first == pytest.approx([0.375 / (std + 1e-6)] * 6, rel=1e-5)
    assert second == pytest.approx([-0.375 / (std + 1e-6)] * 2, rel=1e-5)


def test_gae_goes_over_the_contexts_in_the_order_of_turns() -> None:
    wanted = whitened(
        gae([0, 0.25, 0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), gae([0, 0.5], [0.7, 0.8])
    )
    got = advantages_of("gae", batch_of(), gamma=GAMMA, lam=LAM)
    assert got[0] == pytest.approx(wanted[0], rel=1e-4)
    assert got[1] == pytest.approx(wanted[1], rel=1e-4)


def test_reinforce_plus_plus_discounts_over_the_contexts() -> None:
    wanted = whitened(discounted([0, 0.25, 0, 0, 0, 1]), discounted([0, 0.5]))
    got = advantages_of("reinforce_plus_plus", batch_of(), gamma=GAMMA)
    assert got[0] == pytest.approx(wanted[0], rel=1e-4)
    assert got[1] == pytest.approx(wanted[1], rel=1e-4)


def test_summaries_that_are_not_trained_on_take_no_time() -> None:
    wanted = whitened(gae([0, 0.25, 0, 1], [0.1, 0.2, 0.5, 0.6]), gae([0, 0.5], [0.7, 0.8]))
    got = advantages_of("gae", batch_of(trains_summaries=False), gamma=GAMMA, lam=LAM)
    assert got[0] == pytest.approx(wanted[0], rel=1e-4)
    assert got[1] == pytest.approx(wanted[1], rel=1e-4)


@pytest.mark.parametrize(
    "name", ["grpo", "gae", "rloo", "reinforce_plus_plus", "turn_gae", "turn_return", "gigpo"]
)
def test_contexts_are_credited_as_the_uncut_episode_is(name: str) -> None:
    batch = batch_of()
    cut = advantages_of(name, batch)
    tensors = {"responses": torch.ones(2, TOKENS, dtype=torch.long)}
    for field, fill in (("turn_ids", -1), ("token_level_rewards", 0), ("values", 9)):
        tensor = batch.batch[field]
        tensors[field] = torch.full((2, TOKENS), fill, dtype=tensor.dtype)
        tensors[field][:, :6] = tensor[[0, 2]]
        tensors[field][0, 6:] = tensor[1, :2]
    tensors["response_mask"] = (tensors["turn_ids"] >= 0).to(torch.int8)
    columns = {column: values[[0, 2]] for column, values in batch.non_tensor_batch.items()}
    joined = DataProto.from_dict(tensors=tensors, non_tensors=columns)
    assert EpisodeRows(joined).one_row_each
    done = compute_advantage(joined, name, config=AlgorithmConfig())
    mask = done.batch["response_mask"].bool()
    for row, advantages in enumerate(cut):
        got = done.batch["advantages"][row][mask[row]].tolist()
        assert got == pytest.approx(advantages, abs=1e-5)
