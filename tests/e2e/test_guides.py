"""What guides written for verl-style trainers do: subclasses, agents that own their environment, plain configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from custom.envs.simple_game import SimpleGameEnvironment
from data.protocol import DataProto
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.ray_trainer import RayPPOTrainer
from workers.multi_turn_rollout import SyncMultiTurnRollout


@pytest.fixture
def settings(tiny_game: Path, tmp_path: Path) -> dict[str, Any]:
    """As a guide writes it: nested, in verl's form, without ppo_mini_batch_size."""
    return {
        "data": {
            "train_batch_size": 2,
            "max_prompt_length": 96,
            "max_response_length": 64,
            "dataloader_num_workers": 0,
        },
        "actor_rollout_ref": {
            "model": {"path": str(tiny_game / "model"), "dtype": "float32"},
            "rollout": {"name": "hf", "n": 2, "dtype": "float32"},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "agent": {"max_turn": 2, "max_turn_tokens": 6, "trial_episodes": 0},
        "trainer": {
            "total_training_steps": 1,
            "logger": ["file"],
            "resume_mode": "disable",
            "alarms": "off",
            "default_local_dir": str(tmp_path / "run"),
            "device": "cpu",
        },
    }


class Owner:
    """An agent that makes its environment itself."""

    def __init__(self) -> None:
        self.environment = SimpleGameEnvironment()

    def reset(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.environment.reset(seed)}]

    def step(self, text: str) -> tuple:
        return self.environment.step(text)


class PlainSteps(AgentTrainer):
    """Plays as the guides' subclasses do."""

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        self.multi_turn_rollout.reset()
        self.facts = self.multi_turn_rollout.rollout()
        return self.multi_turn_rollout.build_update_batch()


def test_a_subclass_that_resets_without_a_batch_trains_on_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["trainer"]["deterministic"] = True
    settings["agent"]["val_length"] = 2
    seen: dict[type, list[DataProto]] = {AgentTrainer: [], PlainSteps: []}
    for kind, batches in seen.items():
        tokenizer = AutoTokenizer.from_pretrained(settings["actor_rollout_ref"]["model"]["path"])
        trainer = kind(settings, tokenizer, agent_cls=Owner)
        trainer.on_batch = batches.append  # type: ignore[method-assign]
        metrics = trainer.fit()
        trainer.shutdown()
        assert metrics["agent/episodes"] == 4 and metrics["val-aux/agent/episodes"] == 2
    for one, other in zip(*seen.values(), strict=True):
        assert (one.non_tensor_batch["uid"] == other.non_tensor_batch["uid"]).all()
        assert (one.non_tensor_batch["env_seed"] == other.non_tensor_batch["env_seed"]).all()
        assert torch.equal(one.batch["responses"], other.batch["responses"])
    last = trainer.facts[0]
    assert {"observation", "reward", "done", "info", "ending", "turns"} <= last.keys() and last["observation"]


def test_an_agent_class_that_owns_its_environment_needs_none_in_the_config(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    source = Path(__file__).read_text().partition("class PlainSteps")[0]
    (tmp_path / "mine.py").write_text(source)
    settings["agent"]["cls"] = {"path": str(tmp_path / "mine.py"), "name": "Owner"}
    trainer = build_trainer(OmegaConf.create(settings))
    assert isinstance(trainer, AgentTrainer) and trainer.suite.names == ["Owner"]
    metrics = trainer.fit()
    trainer.shutdown()
    assert metrics["agent/episodes"] == 4
    del settings["agent"]["cls"]
    with pytest.raises(ValueError, match="nothing to act in"):
        AgentTrainer(settings, trainer.tokenizer)


def test_a_rollout_by_itself_and_its_other_names(settings: dict[str, Any]) -> None:
    trainer = build_trainer(settings, agent_cls=Owner)
    trainer.init_workers()
    rollout = SyncMultiTurnRollout(trainer.actor_rollout_wg, cfg=trainer.config, processor="mine", agent_cls=Owner)
    assert rollout.processor == "mine"
    rollout.reset()
    assert len(rollout.rollout()) == 4
    first = rollout.build_update_batch().non_tensor_batch["env_seed"]
    rollout.reset()
    rollout.rollout()
    assert not np.array_equal(first, rollout.build_update_batch().non_tensor_batch["env_seed"])
    rollout.close()
    trainer.shutdown()


def test_prompts_without_a_collate_fn_and_without_init_workers(settings: dict[str, Any]) -> None:
    rows = [{"prompt": f"{i} 3"} for i in range(4)]

    def reward_fn(data: DataProto) -> torch.Tensor:
        return data.batch["response_mask"].float()

    tokenizer = AutoTokenizer.from_pretrained(settings["actor_rollout_ref"]["model"]["path"])
    trainer = RayPPOTrainer(settings, tokenizer, reward_fn=reward_fn, train_dataset=rows, collate_fn=None)
    metrics = trainer.fit()
    assert trainer.plan.actor.mini_batches == 1 and metrics["critic/score/mean"] > 0
    trainer.shutdown()
