"""Builds a trainer from a config, and from what a program has as objects.

Invariant: `python main.py` and Python users come through here, so that both train the same.
"""

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from data.loading import load_extern_object
from data.rl_dataset import create_dataset, read_rows
from training.agent_trainer import AgentTrainer
from training.config import DataConfig, PPOConfig
from training.config.checks import load_custom_algorithm
from training.config.loader import read_config
from training.ray_trainer import RayPPOTrainer
from training.reward import load_reward_manager
from workers.ranks.distributed import limit_caches, settle_heap


def build_trainer(
    config: PPOConfig | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    **given: Any,
) -> RayPPOTrainer:
    """Builds the trainer of this config, with its datasets, reward functions and workers' classes, but no model yet.

    Args:
        config: typed, or an OmegaConf or a mapping (see `read_config`).
        tokenizer: None: the model's.
        given: arguments of the trainer's, in place of what the config says: train_dataset, reward_fn, specs, ...
    """
    given = {name: value for name, value in given.items() if value is not None}
    config = read_config(
        config, own_data=not given.keys().isdisjoint({"train_dataset", "specs", "agent_cls"})
    )
    limit_caches()
    settle_heap()
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    model, data = config.actor_rollout_ref.model, config.data
    tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(
        model.path, trust_remote_code=model.trust_remote_code
    )
    acts = bool(config.environments) or not given.keys().isdisjoint({"specs", "agent_cls"})
    for name, files, most in (
        ("train_dataset", data.train_files, data.train_max_samples),
        ("val_dataset", data.val_files, data.val_max_samples),
    ):
        if files and name not in given:
            given[name] = (
                read_tasks(files, data, most)
                if acts
                else create_dataset(files, data, tokenizer, None, most)
            )
    if acts:
        return AgentTrainer(config, tokenizer, **given)
    if (own := data.sampler).class_path and "train_sampler" not in given:
        given["train_sampler"] = load_extern_object(own.class_path, str(own.class_name))(
            given["train_dataset"], data
        )
    rewards = {name: given.pop(name, None) for name in ("reward_fn", "val_reward_fn")}
    for shown, name in enumerate(rewards):
        given[name] = (
            rewards[name]
            or rewards["reward_fn"]
            or load_reward_manager(config, tokenizer, num_examine=shown)
        )
    return RayPPOTrainer(config, tokenizer, **given)


def read_tasks(files: tuple[str, ...], data: DataConfig, most: int) -> Any:
    """Reads the rows that an environment's `reset` is given, as they are, or by `data.custom_cls`."""
    if data.custom_cls.path is not None:
        return create_dataset(files, data, None, None, most)
    rows = [row for file in files for row in read_rows(file)]
    return rows[:most] if most >= 0 else rows
