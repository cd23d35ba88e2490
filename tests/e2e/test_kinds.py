"""A kind of episodes is one registration: one of the test's own plays in a run, alone and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data.protocol import DataProto
from tests.e2e import word_kind
from tests.e2e.test_agents import game_config
from tests.e2e.word_kind import WordSpec
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config.loader import ConfigError
from training.features import Feature
from workers.agent_specs import agent_specs
from workers.rollout import kinds


def fit(trainer: AgentTrainer) -> tuple[dict[str, float], list[DataProto]]:
    batches: list[DataProto] = []
    trainer.on_batch = batches.append  # type: ignore[method-assign]
    try:
        return trainer.fit(), batches
    finally:
        trainer.shutdown()


def test_a_kind_that_a_spec_names_plays_beside_environments(
    tiny_game: Path, tmp_path: Path
) -> None:
    config = game_config(tiny_game, tmp_path, "trainer.total_training_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(tiny_game / "model")
    word_kind.TRIED.clear()
    specs = [WordSpec("z"), *agent_specs(config), WordSpec("y")]
    metrics, [batch] = fit(AgentTrainer(config, tokenizer, specs=specs))
    assert [specs[0], specs[2]] == word_kind.TRIED
    assert metrics["agent/episodes"] == len(batch)
    rewards = batch.batch["environment_rewards"].sum(dim=1)
    of_words = batch.non_tensor_batch["agent_index"] != 1
    assert 0 < of_words.sum() < len(batch)
    assert (rewards[of_words] >= 1).all()
    assert set(batch.non_tensor_batch["ending"][of_words]) == {"done"}
    assert "agent_role" not in batch.non_tensor_batch, "the kind names no speakers"


@pytest.fixture
def word_feature(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if a feature brought the kind."""
    brought = {"word": Feature(kinds=("tests.e2e.word_kind:WORD",))}
    monkeypatch.setattr(kinds, "features", lambda: brought)
    kinds.kinds.cache_clear()
    yield
    kinds.kinds.cache_clear()


def test_a_kind_that_a_feature_brings_plays_what_the_config_names(
    word_feature: None, tiny_game: Path, tmp_path: Path
) -> None:
    game = ("agent.environment.name=word:z", "agent.environment.path=null")
    config = game_config(tiny_game, tmp_path, *game, "trainer.total_training_steps=1")
    trainer = build_trainer(config)
    assert isinstance(trainer, AgentTrainer)
    assert trainer.specs == [WordSpec("z")]
    metrics, [batch] = fit(trainer)
    assert metrics["agent/episodes"] == len(batch)
    assert (batch.batch["environment_rewards"].sum(dim=1) >= 1).all()


def test_a_kinds_own_checks_and_trial_keep_a_run_from_beginning(
    word_feature: None, tiny_game: Path, tmp_path: Path
) -> None:
    game = ("agent.environment.path=null", "agent.environment.name=word:zy")
    with pytest.raises(ConfigError, match=r"agent\.environment\.name=word:zy: give one letter"):
        game_config(tiny_game, tmp_path, *game)
    tokenizer = AutoTokenizer.from_pretrained(tiny_game / "model")
    trainer = AgentTrainer(game_config(tiny_game, tmp_path), tokenizer, specs=[WordSpec("")])
    with pytest.raises(ConfigError, match="the letter '' weighs nothing"):
        trainer.init_workers()
    trainer.shutdown()


def test_a_spec_that_names_no_kind_is_told() -> None:
    with pytest.raises(TypeError, match="names no kind of episodes: give a spec with kind="):
        kinds.kind_of(object())  # type: ignore[arg-type]
