"""Records of episodes that were played by hand: their rows, and what a turn says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.packed_arrays import unpack_array
from features.records import episode_records
from features.records.row_records import row_records
from scripts.replay_episodes import row_of
from tests.unit.test_episode import completion, said, start, tokens  # noqa: F401
from workers.environments.reply import StepReply
from workers.rollout.engine import Completion
from workers.rollout.episode import Episode, Row


def row_read(row: Row) -> dict[str, Any]:
    """A row's record as a file's reader has it, its arrays as lists."""
    [record] = row_records([row])
    return {
        name: value if value is None else unpack_array(value, "<f4").tolist()
        for name, value in record.items()
    }


def test_a_rows_record_has_an_entry_for_each_token() -> None:
    row = Row(prompt_ids=[1, 2])
    episode = Episode(group=0, sample=0, rows=[row, Row(prompt_ids=[3])])
    row.append_sampled(
        Completion(request_id="0", token_ids=[5, 6], log_probs=[-0.5, -0.1], finish_reason="stop"),
        0,
    )
    episode.add_reward(0.25)
    row.append_tokens([7, 8])
    row.append_sampled(
        Completion(request_id="0", token_ids=[9], log_probs=[-2.0], finish_reason="stop"), 1
    )
    episode.add_reward(1.0)
    episode.add_reward(0.5)
    record = row_read(row)
    assert record == {
        "prompt_ids": [1, 2],
        "response_ids": [5, 6, 7, 8, 9],
        "response_mask": [1, 1, 0, 0, 1],
        "log_probs": [pytest.approx(x) for x in (-0.5, -0.1, 0.0, 0.0, -2.0)],
        "turn_ids": [0, 0, -1, -1, 1],
        "rewards": [0.0, 0.25, 0.0, 0.0, 1.5],
        "template_mask": None,
        "parent": None,
    }
    assert row_of(json.loads(json.dumps(record))) == row


def test_the_record_has_the_engines_seconds_and_the_last_name_of_a_task(
    start,  # noqa: F811
    tokens,  # noqa: F811
    monkeypatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("workers.rollout.episode_play.time.perf_counter", lambda: now[0])
    episode, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    for seconds, name in ((2.5, "low numbers"), (0.5, "high numbers"), (0.25, "")):
        now[0] += seconds
        play.send(completion(tokens, "5"))
        now[0] += 10.0
        play.send(StepReply(messages=said("higher"), reward=0.0, task=name))
    assert episode_records.task_name_of(episode) == "high numbers"
    assert [episode_records.turn_record(turn)["engine_seconds"] for turn in episode.turns] == [
        2.5,
        0.5,
        0.25,
    ]
