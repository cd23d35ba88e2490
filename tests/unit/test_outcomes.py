"""What came of a step's groups: by hand, and however the rows lie."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from custom.reward_managers.unscored import UNSCORED
from data.array_ops import object_array
from data.learning_sampler import GroupOutcome
from data.protocol import DUMMY_UID, DataProto
from training.batch.episode_rows import REWARD_INFO
from training.outcomes import as_plain, from_plain, outcomes_of

Row = dict[str, Any]


def row(uid: str, sample: int, score: float, **parts: Any) -> Row:
    """A row of three tokens, of which two were sampled."""
    default = {"mask": [1, 1, 0], "turns": [0, 0, -1], "facts": None, "unscored": False, "row": 0}
    return {"uid": uid, "episode": f"{uid}.{sample}", "score": score, **default, **parts}


def facts(ending: str = "done", tokens: int = 2) -> dict[str, Any]:
    return {"ending": ending, "sampled_tokens": tokens}


def batch_of(rows: list[Row], *, with_facts: bool = False) -> DataProto:
    columns = {
        "uid": object_array([each["uid"] for each in rows]),
        "episode_id": object_array([each["episode"] for each in rows]),
        "episode_row": np.array([each["row"] for each in rows]),
        "task_index": np.array([ord(each["uid"][-1]) for each in rows]),
        REWARD_INFO + UNSCORED: object_array([each["unscored"] for each in rows]),
    }
    if with_facts:
        columns["episode_facts"] = object_array([each["facts"] for each in rows])
    scores = [[0.0, each["score"], 0.0] for each in rows]
    return DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([each["mask"] for each in rows]),
            "turn_ids": torch.tensor([each["turns"] for each in rows]),
            "token_level_scores": torch.tensor(scores),
        },
        non_tensors=columns,
    )


def test_a_group_has_its_episodes_rewards_and_tokens() -> None:
    rows = [row("1.a", 0, 1.0), row("1.a", 1, 0.5), row("1.b", 0, 0.0)]
    assert outcomes_of(batch_of(rows)) == [
        GroupOutcome(task=ord("a"), rewards=(0.5, 1.0), tokens=4),
        GroupOutcome(task=ord("b"), rewards=(0.0,), tokens=2),
    ]


def test_an_episode_of_several_rows_is_one() -> None:
    rows = [row("1.a", 0, 1.0), row("1.a", 0, 0.25, row=1), row("1.a", 1, 0.0)]
    [outcome] = outcomes_of(batch_of(rows))
    assert outcome.rewards == (0.0, 1.25) and outcome.tokens == 6


def test_failed_and_unscored_episodes_stand_apart() -> None:
    rows = [
        row("1.a", 0, 1.0, facts=facts()),
        # As agent.on_failure=zero trains on it.
        row("1.a", 1, 0.0, facts=facts("env_crash", tokens=9)),
        row("1.a", 2, 0.0, facts=facts("overflow")),
        row("1.a", 3, 0.0, facts=facts(), unscored=True),
    ]
    [outcome] = outcomes_of(batch_of(rows, with_facts=True))
    assert outcome == GroupOutcome(task=ord("a"), rewards=(0.0, 1.0), failed=2, tokens=15)


def test_a_prompt_that_was_not_answered_failed() -> None:
    rows = [row("1.a", 0, 1.0), row("1.a", 1, 0.0, mask=[0, 0, 0], turns=[-1, -1, -1])]
    [outcome] = outcomes_of(batch_of(rows))
    assert outcome == GroupOutcome(task=ord("a"), rewards=(1.0,), failed=1, tokens=2)


def test_what_was_left_out_since_it_was_played_has_tokens_and_no_reward() -> None:
    rows = [row("1.a", sample, 0.0, mask=[0, 0, 0]) for sample in range(2)]
    assert outcomes_of(batch_of(rows)) == [GroupOutcome(task=ord("a"), tokens=4)]


def test_order_and_dummies_change_nothing() -> None:
    draws = random.Random(0)
    rows = [row(f"1.{uid}", n, draws.random()) for uid in "abc" for n in range(4)]
    expected = outcomes_of(batch_of(rows))
    for _ in range(5):
        draws.shuffle(rows)
        padded = batch_of(rows + rows[:3])
        padded.non_tensor_batch["uid"][-3:] = DUMMY_UID
        assert outcomes_of(padded) == expected


def test_outcomes_come_back_from_plain_values() -> None:
    outcomes = [GroupOutcome(task=3, rewards=(0.1, 1.0), failed=1, tokens=7)]
    assert from_plain(as_plain(outcomes)) == outcomes


def test_rewards_that_differ_have_spread() -> None:
    assert GroupOutcome(task=0, rewards=(0.0, 1.0)).has_spread
    assert not GroupOutcome(task=0, rewards=(1.0, 1.0)).has_spread
    assert not GroupOutcome(task=0, rewards=(1.0,)).has_spread
    assert not GroupOutcome(task=0).has_spread
