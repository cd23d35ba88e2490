"""Unmodified programs of the SDKs are trained: every request is a turn, every row token-exact.

The packages that this interpreter lacks may be in another one, PROGRAM_SDK_PYTHON.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from data.protocol import DataProto
from features.records.episode_files import read_episodes
from scripts import replay
from tests.conftest import PROJECT
from tests.e2e.test_agents import GRPO, ROLLOUT, facts_of, fit, game_config
from tests.e2e.test_training import read_steps
from tests.features.programs.runs.test_programs import running
from tests.features.programs.test_sdks import python_with

SCRIPT = PROJECT / "tests/features/programs/runs/programs/sdk_clients.py"
# For each client the package, the requests of an episode, and the rows that these become at least
# and at most: smolagents writes an answer in words of its own where it reads a call in it.
CLIENTS = {
    "plain": ("openai", 2, (1, 1)),
    "stream": ("openai", 2, (1, 1)),
    "parallel": ("openai", 4, (4, 4)),
    "tools": ("openai", 2, (1, 1)),
    "anthropic": ("anthropic", 2, (1, 1)),
    "smolagents_tools": ("smolagents", 3, (1, 3)),
    "smolagents_code": ("smolagents", 3, (1, 3)),
    "langgraph": ("langgraph", 2, (1, 1)),
    "openai_agents": ("openai-agents", 2, (1, 1)),
}
# What the engine sampled with, and what the trainer makes of the same row, in nats.
LARGEST_DIFFERENCE = 1e-4


# smolagents tells its models of itself at length.
LONG = (
    "data.max_prompt_length=6000",
    "data.max_response_length=2000",
    "actor_rollout_ref.model.use_remove_padding=true",
)
SHORT = ("data.max_prompt_length=200", "data.max_response_length=200")
POSITIONS = 8192


def lengths_of(name: str) -> tuple[str, ...]:
    return LONG if name.startswith("smolagents") else SHORT


def with_room(task: Path, folder: Path) -> Path:
    """Copies the tiny model, which then reads longer rows."""
    shutil.copytree(task / "model", folder / "task/model")
    file = folder / "task/model/config.json"
    config = json.loads(file.read_text()) | {"max_position_embeddings": POSITIONS}
    file.write_text(json.dumps(config))
    return folder / "task"


def train(task: Path, folder: Path, name: str, *settings: str) -> list[DataProto]:
    package, _, _ = CLIENTS[name]
    command = f"{python_with(package)} {SCRIPT} {name}"
    config = game_config(
        with_room(task, folder),
        folder / "run",
        *running(command),
        *GRPO,
        "agent.max_turn=9",
        "agent.step_timeout_s=120",
        *lengths_of(name),
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        f"{ROLLOUT}.n=2",
        *settings,
    )
    _, batches = fit(config)
    return batches


def check(batches: list[DataProto], folder: Path, name: str) -> None:
    _, requests, (fewest, most) = CLIENTS[name]
    folder = folder / "run"
    steps = read_steps(folder)
    assert len(batches) == len(steps) == 2
    for number, (batch, step) in enumerate(zip(batches, steps, strict=True), start=1):
        facts = facts_of(batch)
        assert {(entry["ending"], entry["turns"]) for entry in facts} == {("done", requests)}, facts
        assert step["agent/info/program_requests/mean"] == requests
        assert step["agent/info/program_refused/mean"] == 0
        assert step["agent/info/program_undelivered/mean"] == 0
        real = batch.drop_dummies()
        of_episode = Counter(real.non_tensor_batch["episode_id"].tolist())
        assert fewest <= min(of_episode.values()) <= max(of_episode.values()) <= most
        mask = real.batch["response_mask"].bool()
        assert int(mask.sum()) == sum(entry["sampled_tokens"] for entry in facts)
        difference = (real.batch["rollout_log_probs"] - real.batch["old_log_probs"])[mask]
        assert difference.abs().max() < LARGEST_DIFFERENCE
        file = folder / f"episodes/{number}.jsonl"
        for episode in read_episodes(file):
            assert len(episode["rows"]) == of_episode[episode["episode_id"]]
        assert replay.main([str(folder / "config.yaml"), str(file)]) == replay.SAME


def test_a_program_of_openais_sdk_is_trained_token_for_token(
    tiny_game: Path, tmp_path: Path
) -> None:
    batches = train(tiny_game, tmp_path, "plain", "programs.preload=[openai]")
    check(batches, tmp_path, "plain")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CLIENTS if name != "plain"])
def test_so_is_each_sdks(tiny_game: Path, tmp_path: Path, name: str) -> None:
    check(train(tiny_game, tmp_path, name), tmp_path, name)


@pytest.mark.slow
@pytest.mark.vllm
def test_so_is_one_that_vllm_samples(tiny_game: Path, tmp_path: Path) -> None:
    batches = train(tiny_game, tmp_path, "parallel", f"{ROLLOUT}.name=vllm")
    check(batches, tmp_path, "parallel")
