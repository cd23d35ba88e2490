"""The columns of a step: the batch's rows without dummies, and the ranks' records beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.protocol import DataProto
from features.records.episode_recorder import EpisodeRecorder
from features.records.step_arrays import TrainedStep, step_arrays
from features.records.token_fates import FATES
from features.records.token_record import UpdateRecord
from training.config import PPOConfig
from training.config.loader import load_config
from training.observers import ObservedRun

LENGTHS = (3, 1, 2, 2)


def make_batch() -> DataProto:
    """Four rows of two groups, of which the last is a dummy; row 2's group is masked as stale."""
    is_token = torch.arange(4) < torch.tensor(LENGTHS)[:, None]
    mask = is_token.to(torch.int8)
    mask[2:] = 0
    turn_ids = torch.where(is_token, 0, -1).to(torch.int16)
    floats = torch.arange(16, dtype=torch.float32).view(4, 4) * mask
    tensors = {
        "responses": torch.zeros(4, 4, dtype=torch.int32),
        "attention_mask": torch.cat([torch.ones(4, 2), is_token], dim=1).to(torch.int8),
        "response_mask": mask,
        "turn_ids": turn_ids,
        "advantages": floats + 1,
        "returns": floats,
        "token_level_scores": torch.zeros(4, 4),
        "token_level_rewards": torch.zeros(4, 4),
        "row_number": torch.tensor([40, 41, 42, 43]),
    }
    columns = {"uid": ["a", "a", "b", "dummy"], "episode_id": ["a0", "a1", "b0", "dummy"]}
    info = {"global_steps": 7, "validate": False}
    return DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info=info)


def record(rows: dict[int, list[float]], mini_batch: int, **others: Any) -> UpdateRecord:
    values = np.concatenate([np.array(v, np.float32) for v in rows.values()])
    return UpdateRecord(
        row_numbers=np.array(list(rows)),
        passes=np.full(len(rows), mini_batch),
        lengths=np.array([len(v) for v in rows.values()]),
        tokens={"log_prob": values, "entropy": values + 1, "policy_weight": values},
        times_trained=dict.fromkeys(rows, 2),
        **others,
    )


def arrays_of(*records: UpdateRecord | None, **others: Any) -> dict[str, np.ndarray]:
    trained = TrainedStep(step=7, batch=make_batch(), records=records, **others)
    return step_arrays(trained, PPOConfig())


def fates_of(columns: dict[str, np.ndarray]) -> list[str]:
    return [FATES[code].name for code in columns["fate"]]


def test_ranks_are_joined_by_row_numbers_and_dummies_left_out() -> None:
    columns = arrays_of(record({42: [5, 6], 41: [4]}, 1), None, record({40: [1, 2, 3]}, 0))
    assert columns["offsets"].tolist() == [0, 3, 4, 6]
    assert columns["episode_id"].tolist() == ["a0", "a1", "b0"]
    assert columns["log_prob"].tolist() == [1, 2, 3, 4, 5, 6]
    assert columns["entropy"].tolist() == [2, 3, 4, 5, 6, 7]
    assert columns["times_trained"].tolist() == [2, 2, 2]
    assert columns["returns"].tolist() == [0, 1, 2, 4, 0, 0]


def test_of_several_passes_the_last_counts_and_rows_drawn_twice_in_it_add_up() -> None:
    columns = arrays_of(record({40: [1, 2, 3]}, 0), record({40: [5, 5, 5]}, 3))
    assert columns["log_prob"][:3].tolist() == [5, 5, 5]
    assert columns["times_trained"].tolist() == [4, 0, 0]
    columns = arrays_of(record({40: [1, 2, 3]}, 2), record({40: [1, 2, 3]}, 2))
    assert columns["policy_weight"][:3].tolist() == [2, 4, 6]
    assert columns["log_prob"][:3].tolist() == [1, 2, 3]
    one = record({40: [1, 2, 3], 42: [7, 8], 41: [9]}, 2)
    numbers, lengths = np.array([40, 42, 40]), np.array([3, 2, 3])
    values = np.array([1, 2, 3, 7, 8, 1, 2, 3], np.float32)
    drawn_twice = replace(
        one,
        row_numbers=numbers,
        lengths=lengths,
        tokens={"log_prob": values, "policy_weight": values},
    )
    columns = arrays_of(drawn_twice)
    assert columns["policy_weight"].tolist() == [2, 4, 6, 0, 7, 8]
    assert columns["log_prob"].tolist() == [1, 2, 3, 0, 7, 8]


def test_a_skipped_update_counts_where_it_was_the_last_over_the_row() -> None:
    columns = arrays_of(record({40: [1, 0, 3], 41: [1]}, 1, skipped=(1,)))
    assert fates_of(columns)[:4] == ["skipped"] * 4
    columns = arrays_of(
        record({40: [1, 0, 3]}, 0, skipped=(0,)), record({40: [1, 0, 3], 41: [1]}, 1)
    )
    assert fates_of(columns)[:4] == ["trained", "clipped", "trained", "trained"]


def test_groups_that_are_too_old_are_stale_and_named() -> None:
    config = load_config(["configs/quickstart.yaml", "trainer.async_level=1"], check=False).config
    recorder = EpisodeRecorder(ObservedRun(config=config, run_dir=Path("run")))
    recorder.update_begins(make_batch())
    columns = arrays_of(record({40: [1, 2, 3], 41: [1]}, 0), stale=recorder._stale)
    assert fates_of(columns)[4:] == ["stale", "stale"]
    assert '"dropped": [{"episode_id": "b0", "uid": "b", "why": "stale"}]' in str(columns["meta"])


def test_a_warm_up_has_no_columns_of_the_update() -> None:
    columns = arrays_of(updates_policy=False)
    assert "log_prob" not in columns and fates_of(columns)[:4] == ["warmup"] * 4
