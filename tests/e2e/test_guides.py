"""What guides for verl-style trainers do: subclasses, agents with environments, plain configs."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from custom.envs.simple_game import SimpleGameEnvironment
from data.loading import load_extern_object
from data.protocol import DataProto
from tests.conftest import PROJECT
from training.agent_trainer import AgentTrainer
from training.building import build_trainer
from training.config.loader import ConfigError
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


def test_a_subclass_that_resets_without_a_batch_trains_on_the_same(
    settings: dict[str, Any], tmp_path: Path
) -> None:
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
    assert {"observation", "reward", "done", "info", "ending", "turns"} <= last.keys() and last[
        "observation"
    ]


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
    rollout = SyncMultiTurnRollout(
        trainer.actor_rollout_wg, cfg=trainer.config, processor="mine", agent_cls=Owner
    )
    assert rollout.processor == "mine"
    rollout.reset()
    assert len(rollout.rollout()) == 4
    first = rollout.build_update_batch().non_tensor_batch["env_seed"]
    rollout.reset()
    rollout.rollout()
    assert not np.array_equal(first, rollout.build_update_batch().non_tensor_batch["env_seed"])
    rollout.close()
    trainer.shutdown()


class GuidesTrainer(RayPPOTrainer):
    """Written as the guide has it, on the trainer of prompts."""

    def __init__(
        self, config, tokenizer, role_worker_mapping, resource_pool_manager, agent_cls, **kwargs
    ):
        self.agent_cls = agent_cls
        super().__init__(config, tokenizer, role_worker_mapping, resource_pool_manager, **kwargs)

    def init_workers(self):
        super().init_workers()
        self.multi_turn_rollout = SyncMultiTurnRollout(
            actor_rollout_wg=self.actor_rollout_wg,
            cfg=self.config,
            tokenizer=self.tokenizer,
            processor=self.processor,
            agent_cls=self.agent_cls,
        )

    def _generate_multi_turn_sequences(self, gen_batch):
        gen_batch.meta_info.update({"do_sample": True})
        self.multi_turn_rollout.reset()
        self.multi_turn_rollout.rollout()
        batch = self.multi_turn_rollout.build_update_batch()
        return DataProto(
            batch=batch.batch, non_tensor_batch=batch.non_tensor_batch, meta_info=batch.meta_info
        )


def guides_run(
    settings: dict[str, Any], **given: Any
) -> tuple[dict[str, float], list[DataProto], GuidesTrainer]:
    tokenizer = AutoTokenizer.from_pretrained(settings["actor_rollout_ref"]["model"]["path"])
    trainer = GuidesTrainer(settings, tokenizer, None, None, processor="mine", **given)
    batches: list[DataProto] = []
    trainer.on_batch = batches.append  # type: ignore[method-assign]
    try:
        trainer.init_workers()
        return trainer.fit(), batches, trainer
    finally:
        trainer.shutdown()


@pytest.mark.parametrize("form", ["class", "rows", "names"])
def test_the_guides_own_agent_trainer_trains_as_written(
    settings: dict[str, Any], form: str
) -> None:
    settings["agent"]["agent_length"] = 4
    settings["trainer"] |= {"total_training_steps": 2, "deterministic": True}
    given: dict[str, Any] = {"agent_cls": Owner}
    episodes = 8
    if form == "rows":
        # Their number is the step's.
        episodes = 4
        given |= {
            "train_dataset": [{"prompt": f"{i} 3", "data_source": "mine"} for i in range(4)],
            "reward_fn": lambda data: data.batch["environment_rewards"],
        }
    elif form == "names":
        given["agent_cls"] = None
        settings["env_template"] = [
            "custom.envs.simple_game:SimpleGameEnvironment",
            str(PROJECT / "custom/envs/guess_number.py:GuessNumber"),
        ]
    metrics, batches, trainer = guides_run(settings, **given)
    assert trainer.processor == "mine" and trainer.multi_turn_rollout.processor == "mine"
    assert metrics["agent/episodes"] == episodes
    assert [len(batch) for batch in batches] == [episodes] * 2
    seeds = [set(batch.non_tensor_batch["env_seed"]) for batch in batches]
    assert all(len(of_step) == episodes // 2 for of_step in seeds) and seeds[0] != seeds[1]
    if form == "rows":
        assert set(batches[0].non_tensor_batch["data_source"]) == {"mine"}
    if form == "names":
        assert metrics["env/GuessNumber/episodes"] == 4
    else:
        # What our own trainer of agents plays and scores is the same.
        settings["data"]["train_batch_size"] = episodes // 2
        del settings["agent"]["agent_length"]
        ours = AgentTrainer(settings, trainer.tokenizer, agent_cls=Owner)
        seen: list[DataProto] = []
        ours.on_batch = seen.append  # type: ignore[method-assign]
        ours.fit()
        ours.shutdown()
        for one, other in zip(batches, seen, strict=True):
            for name in ("responses", "token_level_scores", "advantages"):
                assert torch.equal(one.batch[name], other.batch[name])


def test_agents_that_are_given_have_the_number_that_the_config_says(
    settings: dict[str, Any],
) -> None:
    settings["agent"]["agent_length"] = 4
    settings["actor_rollout_ref"]["actor"] = {"ppo_mini_batch_size": 4}
    tokenizer = AutoTokenizer.from_pretrained(settings["actor_rollout_ref"]["model"]["path"])
    trainer = AgentTrainer(settings, tokenizer, agent_cls=Owner, processor="mine")
    assert trainer.processor == "mine" and trainer.config.prompts_per_step == 4
    settings["actor_rollout_ref"]["actor"] = {"ppo_mini_batch_size": 3}
    with pytest.raises(ValueError, match=r"agent\.agent_length=4 must be a multiple"):
        AgentTrainer(settings, tokenizer, agent_cls=Owner)


REWARDS = """
def nothing(trajectory):
    return None

def of_rows(data_source, solution_str, ground_truth):
    return 1.0
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", r"mine.py:2\) returned the reward None"),
        ("of_rows", r"mine.py:5\) takes \(data_source, solution_str, ground_truth\)"),
    ],
)
@pytest.mark.parametrize("kind", [AgentTrainer, GuidesTrainer])
def test_a_reward_function_of_agents_that_is_none_is_told_before_generation(
    settings: dict[str, Any], tmp_path: Path, name: str, words: str, kind: type
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    settings["custom_reward_function"] = {"path": str(tmp_path / "mine.py"), "name": name}
    tokenizer = AutoTokenizer.from_pretrained(settings["actor_rollout_ref"]["model"]["path"])
    with contextlib.ExitStack() as stack, pytest.raises(ConfigError, match=words) as told:
        trainer = kind(settings, tokenizer, None, None, agent_cls=Owner)
        stack.callback(trainer.shutdown)
        trainer.init_workers()
    assert "cannot be built" not in str(told.value) and "crash" not in str(told.value)


def test_prompts_without_a_collate_fn_and_without_init_workers(settings: dict[str, Any]) -> None:
    rows = [{"prompt": f"{i} 3"} for i in range(4)]

    def reward_fn(data: DataProto) -> torch.Tensor:
        return data.batch["response_mask"].float()

    tokenizer = AutoTokenizer.from_pretrained(settings["actor_rollout_ref"]["model"]["path"])
    trainer = RayPPOTrainer(
        settings, tokenizer, reward_fn=reward_fn, train_dataset=rows, collate_fn=None
    )
    metrics = trainer.fit()
    assert trainer.plan.actor.mini_batches == 1 and metrics["critic/score/mean"] > 0
    trainer.shutdown()


GUIDES_DATASET = """
import torch

from data.rl_dataset import RLHFDataset


class Levels(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        super().__init__(data_files, tokenizer, config, processor)
        self.names = [f"row {i}" for i in range(len(self))]

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = [row for row in self.dataframe if row["level"] > 1]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["name"], row["hint"] = self.names[item], torch.full((2,), float(row["level"]))
        return row


def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth)
"""


@pytest.fixture
def with_levels(settings: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Those settings, with a file of prompts and a dataset class as a guide would write it."""
    (tmp_path / "mine.py").write_text(GUIDES_DATASET)
    shared = {"data_source": "mine", "prompt": [{"role": "user", "content": "above 1 below 3"}]}
    rows = [{**shared, "reward_model": {"ground_truth": str(i)}, "level": i} for i in range(6)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    settings["data"] |= {"train_files": str(tmp_path / "train.json"), "shuffle": False}
    return settings


def test_a_subclass_of_the_dataset_that_adds_columns_trains_by_its_name(
    with_levels: dict[str, Any], tmp_path: Path
) -> None:
    with_levels["data"]["custom_cls"] = {"path": str(tmp_path / "mine.py"), "name": "Levels"}
    with_levels["custom_reward_function"] = {"path": str(tmp_path / "mine.py")}
    trainer = build_trainer(OmegaConf.create(with_levels))
    batches: list[DataProto] = []
    trainer.on_batch = batches.append  # type: ignore[method-assign]
    assert trainer.fit()["critic/score/mean"] == 2.5
    trainer.shutdown()
    assert batches[0].non_tensor_batch["name"].tolist() == ["row 0", "row 0", "row 1", "row 1"]
    assert batches[0].batch["hint"][:, 0].tolist() == [2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("with_collate", [False, True])
def test_a_dataset_and_a_collate_function_are_given_as_objects(
    with_levels: dict[str, Any], tmp_path: Path, with_collate: bool
) -> None:
    def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
        kept = {
            name: torch.stack([row[name] for row in rows])
            for name in ("input_ids", "attention_mask", "hint")
        }
        return {**kept, "name": [row["name"].upper() for row in rows]}

    def reward_fn(data: DataProto) -> torch.Tensor:
        with pytest.raises(KeyError, match=r"is in non_tensor_batch\['name'\]"):
            data.batch["name"]
        seen.extend(data.non_tensor_batch["name"])
        return data.batch["hint"][:, 0]

    seen: list[str] = []
    config = OmegaConf.create(with_levels)
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    dataset_cls = load_extern_object(str(tmp_path / "mine.py"), "Levels")
    dataset = dataset_cls(config.data.train_files, tokenizer, config.data)
    given = {"train_dataset": dataset, "collate_fn": collate if with_collate else None}
    trainer = RayPPOTrainer(config, tokenizer, reward_fn=reward_fn, **given)
    trainer.init_workers()
    assert trainer.fit()["critic/score/mean"] == 2.5
    trainer.shutdown()
    names = ["row 0", "row 0", "row 1", "row 1"]
    assert seen == ([name.upper() for name in names] if with_collate else names)
