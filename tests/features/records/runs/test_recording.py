"""What a run records by default: its episodes, and of each token what the update made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from data.protocol import DataProto
from features.records.episode_files import read_episodes
from features.records.episode_recorder import EpisodeRecorder
from features.records.step_arrays import Columns, read_step_arrays
from tests.conftest import PROJECT
from tests.e2e.test_agents import (
    ACTOR,
    GRPO,
    ROLLOUT,
    fit,
    game_config,
    playing,
    without_times,
)
from tests.e2e.test_training import tiny_config

CAPTURING = (
    f"custom_algorithm={PROJECT}/tests/e2e/capturing_loss.py",
    f"{ACTOR}.policy_loss.loss_mode=capturing",
)


def read(run_dir: Path, step: int) -> tuple[dict[str, Any], Columns]:
    return read_step_arrays(run_dir / f"episodes/{step}.npz")


def fates(run_dir: Path, step: int) -> dict[str, int]:
    """How many tokens have each fate."""
    meta, columns = read(run_dir, step)
    codes, counts = np.unique(columns["fate"], return_counts=True)
    return {
        meta["fates"][str(code)]["name"]: int(count)
        for code, count in zip(codes, counts, strict=True)
    }


def tokens_of(columns: Columns, row: int, name: str) -> np.ndarray:
    return columns[name][columns["offsets"][row] : columns["offsets"][row + 1]]


def captured_rows(folder: Path) -> list[dict[str, np.ndarray]]:
    """The rows that the loss was given, in the order of its calls."""
    rows = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        for place in range(len(arrays["mask"])):
            rows.append({name: values[place] for name, values in arrays.items()})
    return rows


def assert_recorded_as_the_loss_saw_it(run_dir: Path, captured: Path, ranks: int) -> None:
    """Finds each trained row among those of the loss's calls, and compares every number."""
    rows = captured_rows(captured)
    for step in (1, 2):
        _, columns = read(run_dir, step)
        assert (columns["times_trained"] == 2).all()
        compared = 0
        for row in range(len(columns["uid"])):
            own = {
                name: tokens_of(columns, row, name)
                for name in (
                    "response_mask",
                    "advantages",
                    "old_log_probs",
                    "log_prob",
                    "policy_weight",
                )
            }
            size = len(own["advantages"])
            mask = own["response_mask"].astype(bool)
            found = [
                seen
                for seen in rows
                if np.array_equal(seen["mask"][:size] > 0, mask)
                and not seen["mask"][size:].any()
                and np.array_equal(seen["log_prob"][:size][mask], own["log_prob"][mask])
                and np.array_equal(seen["advantages"][:size][mask], own["advantages"][mask])
            ]
            assert found, f"no call of the loss had row {row} of step {step}"
            seen = found[-1]
            assert np.array_equal(seen["old_log_probs"][:size][mask], own["old_log_probs"][mask])
            weights = -seen["gradient"][:size] / ranks
            assert np.array_equal(weights, own["policy_weight"])
            compared += mask.sum()
        assert compared > 2 * len(columns["uid"])


def captures_into(folder: Path) -> tuple[str, ...]:
    """Makes the folder; returns settings of two shuffled epochs, whose loss writes into it."""
    folder.mkdir()
    return (
        *CAPTURING,
        f"{ACTOR}.policy_loss.custom_kwargs={{folder: {folder}}}",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.shuffle=true",
    )


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-sum"])
def test_what_is_recorded_is_what_the_loss_was_given(
    tiny_game: Path, tmp_path: Path, agg: str
) -> None:
    captured = tmp_path / "captured"
    own = (
        *captures_into(captured),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
        f"{ACTOR}.loss_agg_mode={agg}",
        f"{ROLLOUT}.n=2",
    )
    _, batches = fit(game_config(tiny_game, tmp_path / "run", *own))
    assert_recorded_as_the_loss_saw_it(tmp_path / "run", captured, ranks=1)
    for step, batch in enumerate(batches, start=1):
        assert_columns_are_the_batch(batch, read(tmp_path / "run", step)[1])


def assert_columns_are_the_batch(batch: DataProto, columns: Columns) -> None:
    """Compares every column that comes from the batch, row by row."""
    real = batch.drop_dummies()
    width = real.batch["responses"].shape[1]
    lengths = real.batch["attention_mask"][:, -width:].sum(dim=1).tolist()
    assert columns["offsets"].tolist() == [0, *np.cumsum(lengths)]
    assert columns["episode_id"].tolist() == list(real.non_tensor_batch["episode_id"])
    for name in (
        "response_mask",
        "advantages",
        "returns",
        "token_level_scores",
        "token_level_rewards",
        "old_log_probs",
        "rollout_log_probs",
        "values",
    ):
        for row, length in enumerate(lengths):
            expected = real.batch[name][row, :length].numpy()
            assert np.array_equal(tokens_of(columns, row, name), expected), name


@pytest.mark.usefixtures("cluster")
def test_rows_of_two_ranks_come_back_in_the_batchs_order(tiny_game: Path, tmp_path: Path) -> None:
    captured = tmp_path / "captured"
    own = (
        *captures_into(captured),
        f"{ACTOR}.ppo_mini_batch_size=4",
        "trainer.launcher=ray",
        "trainer.n_gpus_per_node=2",
        f"{ROLLOUT}.name=hf",
    )
    _, batches = fit(game_config(tiny_game, tmp_path / "run", *own))
    assert_recorded_as_the_loss_saw_it(tmp_path / "run", captured, ranks=2)
    assert_columns_are_the_batch(batches[-1], read(tmp_path / "run", 2)[1])
    assert len(read_episodes(tmp_path / "run/episodes/2.jsonl")) == 8


def test_a_runs_numbers_are_bitwise_the_same_without_records(
    tiny_game: Path, tmp_path: Path
) -> None:
    fixed = ("trainer.deterministic=true", "agent.val_length=2", f"{ACTOR}.entropy_coeff=0.01")
    fit(game_config(tiny_game, tmp_path / "on", *fixed, "records.gradients=true"))
    fit(game_config(tiny_game, tmp_path / "off", *fixed, "records.keep_gib=0"))
    assert not (tmp_path / "off/episodes").exists()
    memory = "memory"
    on, off = (
        [{k: v for k, v in step.items() if memory not in k} for step in without_times(folder)]
        for folder in (tmp_path / "on", tmp_path / "off")
    )
    assert on == off
    meta, columns = read(tmp_path / "on", 2)
    # Two mini-batches in each of two epochs.
    assert columns["gradient_share"].sum() == pytest.approx(4.0, abs=1e-3)
    assert meta["metrics"]["actor/grad_norm"] == on[-1]["actor/grad_norm"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "on/episodes/tokenizer")
    episode = read_episodes(tmp_path / "on/episodes/2.jsonl")[0]
    sampled = episode["rows"][0]["response_ids"][episode["rows"][0]["turn_ids"] == 0]
    assert episode["turns"][0]["text"] == tokenizer.decode(sampled, skip_special_tokens=True)


def test_prompts_and_their_validation_are_recorded_too(tiny_task: Path, tmp_path: Path) -> None:
    _, batches = fit(tiny_config(tiny_task, tmp_path, f"{ROLLOUT}.n=2", "data.shuffle=false"))
    names = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    files = "1.jsonl 1.npz 2.jsonl 2.npz tokenizer val-0.jsonl val-2.jsonl"
    assert names == files.split()
    real = batches[0].drop_dummies()
    episodes = {e["episode_id"]: e for e in read_episodes(tmp_path / "episodes/1.jsonl")}
    _, columns = read(tmp_path, 1)
    assert sorted(episodes) == sorted(columns["episode_id"]) and len(episodes) == 16
    for row, name in enumerate(real.non_tensor_batch["episode_id"]):
        episode = episodes[name]
        [turn], [own] = episode["turns"], episode["rows"]
        assert episode["reward"] == real.batch["token_level_scores"][row].sum()
        assert turn["finish_reason"] == real.non_tensor_batch["ending"][row]
        assert episode["initial_messages"][0]["content"]
        length = len(own["response_ids"])
        assert np.array_equal(own["response_ids"], real.batch["responses"][row, :length])
        sampled = own["response_mask"].astype(bool)
        expected = real.batch["rollout_log_probs"][row, :length].numpy()
        assert np.array_equal(own["log_probs"][sampled], expected[sampled])
    assert any(episode["turns"][0]["text"] for episode in episodes.values())
    assert set(fates(tmp_path, 1)) <= {"trained", "clipped", "zero_advantage"}
    assert len(read_episodes(tmp_path / "episodes/val-2.jsonl")) == 16


def test_failures_are_told_from_what_was_trained_on(tiny_game: Path, tmp_path: Path) -> None:
    own = (*GRPO, *playing("Fragile"), "agent.on_failure=mask", "trainer.total_training_steps=1")
    fit(game_config(tiny_game, tmp_path, *own))
    counts = fates(tmp_path, 1)
    assert counts["masked_failure"] > 0 and counts["trained"] > 0 and counts["template"] > 0
    _, columns = read(tmp_path, 1)
    episodes = {e["episode_id"]: e for e in read_episodes(tmp_path / "episodes/1.jsonl")}
    for row, name in enumerate(columns["episode_id"]):
        recorded = episodes[name]["rows"][columns["episode_row"][row]]
        is_masked = tokens_of(columns, row, "fate") == 8
        assert is_masked.any() == (episodes[name]["ending"] == "env_crash")
        if is_masked.any():
            # As it was played, before it was masked.
            assert np.array_equal(recorded["response_mask"] == 1, is_masked)
        if recorded["template_mask"] is not None:
            is_template = np.isin(tokens_of(columns, row, "fate"), (2, 5))
            assert np.array_equal(recorded["template_mask"] == 1, is_template)


def test_a_refilled_episode_keeps_the_attempts_that_crashed(
    tiny_game: Path, tmp_path: Path
) -> None:
    own = (*playing("Flaky"), "agent.max_refills=3", "trainer.total_training_steps=1")
    kwargs = "agent.environment.kwargs={folder: " + str(tmp_path) + "}"
    fit(game_config(tiny_game, tmp_path, *own, kwargs))
    episodes = read_episodes(tmp_path / "episodes/1.jsonl")
    again = [episode for episode in episodes if episode["attempts"] > 1]
    assert again
    for episode in again:
        assert len(episode["failed_attempts"]) == episode["attempts"] - 1
        assert all(attempt["ending"] == "env_crash" for attempt in episode["failed_attempts"])


EQUAL = (*GRPO, *playing("Equal"), "trainer.total_training_steps=1")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (EQUAL, "no_spread"),
        ((*EQUAL, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_epochs=2"), "trained"),
        (("trainer.critic_warmup=1", "trainer.total_training_steps=2"), "warmup"),
        ((*GRPO, *playing("Even"), "algorithm.use_pf_ppo=true"), "not_drawn"),
        ((*GRPO, f"{ACTOR}.clip_ratio=0.000001", f"{ACTOR}.optim.lr=0.01"), "clipped"),
        (
            (
                *GRPO,
                "algorithm.rollout_correction.rollout_rs=token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold=1.0000001",
            ),
            "rejected",
        ),
        (
            (
                *GRPO,
                "algorithm.rollout_correction.bypass_mode=true",
                "algorithm.rollout_correction.rollout_rs=token_k1",
                "algorithm.rollout_correction.rollout_rs_threshold=1.0000001",
            ),
            "rejected",
        ),
        ((*GRPO, "agent.observation_loss_coef=0.1"), "observed"),
        (("agent.max_turn_tokens=1",), "over_limit"),
    ],
    ids=[
        "no_spread",
        "kl",
        "warmup",
        "pf_ppo",
        "clipped",
        "rejected",
        "rejected in the loss",
        "observed",
        "over_limit",
    ],
)
def test_a_fate_is_found_in_a_run_that_has_it(
    tiny_game: Path, tmp_path: Path, settings: tuple[str, ...], expected: str
) -> None:
    fit(game_config(tiny_game, tmp_path, "trainer.total_training_steps=1", *settings))
    counts = fates(tmp_path, 1)
    assert counts.get(expected, 0) > 0, counts
    meta, columns = read(tmp_path, 1)
    assert meta["columns"].keys() == columns.keys()


def test_groups_that_were_filtered_are_recorded_and_named(tiny_game: Path, tmp_path: Path) -> None:
    own = (*GRPO, *playing("Rare"), "algorithm.filter_groups.enable=true")
    fit(game_config(tiny_game, tmp_path, *own, "trainer.total_training_steps=1"))
    meta, columns = read(tmp_path, 1)
    dropped = {entry["episode_id"]: entry["why"] for entry in meta["dropped"]}
    assert "filtered" in dropped.values()
    trained = set(columns["episode_id"].tolist())
    played = {episode["episode_id"] for episode in read_episodes(tmp_path / "episodes/1.jsonl")}
    assert trained.isdisjoint(dropped) and played == trained | dropped.keys()


def test_groups_trained_as_they_end_are_recorded(tiny_game: Path, tmp_path: Path) -> None:
    whole = (*GRPO, f"{ACTOR}.ppo_mini_batch_size=null", "trainer.total_training_steps=1")
    fit(game_config(tiny_game, tmp_path / "whole", *whole))
    fit(game_config(tiny_game, tmp_path / "parts", *whole, "trainer.train_finished_groups=true"))
    results = []
    for folder in ("whole", "parts"):
        _, columns = read(tmp_path / folder, 1)
        assert (columns["times_trained"] == 1).all()
        results.append(
            {
                str(name): tokens_of(columns, row, "policy_weight")
                for row, name in enumerate(columns["episode_id"])
            }
        )
    for name, weights in results[0].items():
        np.testing.assert_allclose(results[1][name], weights, rtol=1e-4, atol=1e-8)


def test_a_resume_cuts_records_back_and_a_new_run_sets_them_aside(
    tiny_game: Path, tmp_path: Path
) -> None:
    steps = ("trainer.save_freq=2", "agent.val_length=2", "trainer.test_freq=1")
    fit(game_config(tiny_game, tmp_path, *steps))
    folder = tmp_path / "episodes"
    first = (folder / "1.npz").read_bytes()
    # As a run leaves them that was killed in its fourth step.
    for name in ("3.jsonl", "3.npz", "4.jsonl", "val-3.jsonl"):
        (folder / name).write_text("{}\n")
    fit(game_config(tiny_game, tmp_path, *steps, "trainer.total_training_steps=3"))
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    assert names == ["1.jsonl", "1.npz", "2.jsonl", "2.npz", "3.jsonl", "3.npz"] + [
        f"val-{step}.jsonl" for step in range(4)
    ]
    assert (folder / "1.npz").read_bytes() == first
    assert len(read_episodes(folder / "3.jsonl")) == 8
    fit(game_config(tiny_game, tmp_path, "trainer.resume_mode=disable"))
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == names[:4]
    old = sorted(path.name for path in (tmp_path / "episodes.old").iterdir() if path.is_file())
    assert old == names


def test_a_disk_without_room_costs_the_records_and_not_the_run(
    tiny_game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    blocked = tmp_path / "blocked"
    config = game_config(tiny_game, tmp_path / "run", f"records.folder={blocked}")
    blocked.write_text("a file where the folder is to be")
    fit(config)
    assert len(without_times(tmp_path / "run")) == 2
    assert "not recorded, the run goes on" in caplog.text
    caplog.clear()
    fit(game_config(tiny_game, tmp_path / "small", "records.keep_gib=0.00001"))
    assert "records.keep_gib" in caplog.text
    used = sum(p.stat().st_size for p in (tmp_path / "small/episodes").glob("*.*"))
    assert used <= 0.00001 * (1 << 30)

    def broken(*_: Any) -> None:
        raise RuntimeError("a fault of the recorder's own")

    monkeypatch.setattr(EpisodeRecorder, "_write_arrays", broken)
    fit(game_config(tiny_game, tmp_path / "broken", "trainer.total_training_steps=1"))
    assert "a fault of the recorder's own" in caplog.text
    lines = (tmp_path / "broken/episodes/1.jsonl").read_text().splitlines()
    assert all(json.loads(line)["ending"] for line in lines)
    assert torch.is_grad_enabled()
