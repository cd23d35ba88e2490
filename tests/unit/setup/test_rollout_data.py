"""Episodes and turns, read off a batch by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from data.protocol import DataProto
from setup import RolloutData

WORDS = ["<pad>", "hello", "left", "wall", "right", "door", "up"]


class Words:
    """Decodes ids as words; 0 is padding."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = False) -> str:
        return " ".join(WORDS[int(number)] for number in ids if number)


@pytest.fixture
def rollout() -> RolloutData:
    """Two episodes: left (wall) right (door), and up, with padding behind it."""
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 1], [0, 1]]),
            "responses": torch.tensor([[2, 3, 4, 5], [6, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]),
            "turn_ids": torch.tensor([[0, -1, 1, -1], [0, -1, -1, -1]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]),
            "rollout_log_probs": torch.tensor([[-1.0, 0, -2.0, 0], [-0.5, 0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0, 3.0, 0], [1.0, 0, 0, 0]]),
        },
        non_tensors={
            "ending": np.array(["done", "max_turns"], dtype=object),
            "uid": np.array(["a", "b"], dtype=object),
        },
    )
    return RolloutData.of(batch, Words())


def test_turns_are_cut_where_the_policy_begins_to_write(rollout: RolloutData) -> None:
    assert rollout.texts == [["left", "right"], ["up"]]
    assert rollout.tokens == [[[2, 3], [4, 5]], [[6]]]
    assert rollout.masks == [[[1, 0], [1, 0]], [[1]]]
    assert rollout.log_probs == [[[-1.0, 0.0], [-2.0, 0.0]], [[-0.5]]]
    assert rollout.rewards == [[0.0, 3.0], [1.0]]


def test_a_trajectory_has_what_the_model_read_and_is_done_with_its_last_turn(
    rollout: RolloutData,
) -> None:
    played, stopped = rollout.trajectories
    assert played.states == ["hello", "wall", ""]
    assert played.actions == ["left", "right"]
    assert played.dones == [False, True]
    assert stopped.dones == [False]
    assert stopped.ending == "max_turns"


def test_turns_stand_in_their_order_where_a_helper_spoke_between() -> None:
    """Row 0 holds turns 0 and 2, the helper's row turn 1."""
    batch = DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[0, 1], [0, 1]]),
            "responses": torch.tensor([[2, 3, 4, 5], [6, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0]]),
            "turn_ids": torch.tensor([[0, -1, 2, -1], [1, -1, -1, -1]]),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]),
            "token_level_scores": torch.tensor([[0.0, 0, 3.0, 0], [0.0, 0, 0, 0]]),
        },
        non_tensors={
            "ending": np.array(["done", "done"], dtype=object),
            "uid": np.array(["a", "a"], dtype=object),
            "episode_id": np.array(["0", "0"], dtype=object),
            "episode_row": np.array([0, 1]),
        },
    )
    played = RolloutData.of(batch, Words())
    assert played.texts == [["left", "up", "right"]]
    assert played.rewards == [[0.0, 0.0, 3.0]]
