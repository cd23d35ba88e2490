"""Lines of episode files: handed out once, with the scores that the trainer made; strict JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.array_ops import object_array
from data.json_lines import strict_json
from data.protocol import DataProto
from features.records.episode_entries import take_played_episodes, take_scored_episodes
from features.records.episode_files import episode_lines, read_episodes
from features.records.episode_records import encode_record


def played(**record: Any) -> DataProto:
    """An episode of two rows, and another one of one."""
    of_episode = {"ending": "done", "reward": 0.0, "turns": 2}
    first = encode_record(of_episode, {"turns": [], **record})
    facts: list[Any] = [of_episode | {"record": first}, None]
    facts.append(of_episode | {"record": encode_record(of_episode, {"turns": []})})
    columns = {
        "uid": object_array(["1.0", "1.0", "1.1"]),
        "episode_id": object_array(["1.0.0", "1.0.0", "1.1.0"]),
        "data_source": object_array(["game"] * 3),
        "agent_index": np.zeros(3, np.int64),
        "env_seed": np.array([5, 5, 6]),
        "episode_facts": object_array(facts),
    }
    scores = torch.tensor([[0.25, 0.0], [0.0, 0.5], [1.0, 0.0]])
    return DataProto.from_dict(
        tensors={"token_level_scores": scores}, non_tensors=columns, meta_info={"global_steps": 1}
    )


def test_records_are_taken_out_once() -> None:
    batch = played()
    assert [entry["episode_id"] for entry in take_played_episodes(batch)] == ["1.0.0", "1.1.0"]
    assert take_played_episodes(batch) == []
    assert "record" not in batch.non_tensor_batch["episode_facts"][0]


def test_a_line_holds_the_record_beside_the_facts_and_each_name_once() -> None:
    content = episode_lines(take_played_episodes(played(task={"question": "1,2 {}"})))
    lines = [json.loads(line, object_pairs_hook=list) for line in content.splitlines()]
    assert len(lines) == 2
    for line in lines:
        names = [name for name, _ in line]
        assert len(set(names)) == len(names)
        assert dict(line)["turns"] == [] and dict(line)["ending"] == "done"
    assert dict(lines[0])["task"] == [("question", "1,2 {}")] and "task" not in dict(lines[1])


def test_a_score_of_the_trainers_is_the_reward_of_all_its_rows() -> None:
    rewards = [entry["reward"] for entry in take_scored_episodes(played())]
    assert rewards == [0.75, 1.0]


@pytest.mark.parametrize(
    "odd",
    [float("nan"), float("inf"), "é\ud800", "\u2028\u202e<script>", b"\xff", {1, 2}, object],
    ids=repr,
)
def test_whatever_an_environment_says_is_a_line_of_strict_json(odd: Any) -> None:
    content = episode_lines([{"said": odd, "number": 0.1}, {"said": "next"}])
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in content.splitlines())
    assert first["number"] == 0.1 and second == {"said": "next"}
    if isinstance(odd, float):
        assert first["said"] is None
    if odd == "\u2028\u202e<script>":
        assert first["said"] == odd
    assert json.loads(strict_json({"said": odd}))


def test_a_damaged_array_is_named(tmp_path: Path) -> None:
    names = ("uid", "episode_id", "data_source", "agent_index", "env_seed", "ending")
    episode: dict[str, Any] = dict.fromkeys((*names, "initial_messages"), "") | {"turns": []}
    arrays = ("prompt_ids", "response_ids", "response_mask", "turn_ids", "log_probs", "rewards")
    row: dict[str, Any] = {name: [1] for name in arrays}
    file = tmp_path / "1.jsonl"
    file.write_text(json.dumps({**episode, "rows": [row]}) + "\n")
    [read] = read_episodes(file)
    assert read["rows"][0]["log_probs"].dtype == np.float32
    file.write_text(json.dumps({**episode, "rows": [row | {"turn_ids": [0, 1]}]}) + "\n")
    with pytest.raises(ValueError, match=r"1\.jsonl line 1: row 0 has 1 response_ids"):
        read_episodes(file)
    packed = {"dtype": "<i8", "base64": ""}
    file.write_text(json.dumps({**episode, "rows": [row | {"turn_ids": packed}]}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: row 0: an array of dtype '<i8'"):
        read_episodes(file)
