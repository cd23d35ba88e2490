"""Makes of a run's configuration that of its supervised training: what plays is left out of it.

Invariant: model, tokens, optimiser and how the policy is placed stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from features.sft.settings import SFTSettings
from training.config import PPOConfig
from training.config.leaves import build
from training.config.loader import ConfigError
from training.config.schema.actor import PolicyLossChoice, RouterReplayConfig
from training.config.schema.algorithm import AlgorithmConfig
from training.config.schema.critic import CriticConfig
from training.config.schema.data import SamplerConfig
from training.config.schema.reward import CustomRewardFunctionConfig, RewardModelConfig

# The folder of its run, in that of the run that it is made for.
FOLDER = "sft"


def sft_folder(config: PPOConfig) -> Path:
    """Returns the folder of the supervised training's run."""
    settings = config.section(SFTSettings)
    return Path(settings.folder or Path(config.trainer.run_dir) / FOLDER)


def max_length_of(config: PPOConfig) -> int:
    """Returns the tokens that a row may have."""
    return config.section(SFTSettings).max_length or config.data.row_length


def sft_config(config: PPOConfig, files: Sequence[str]) -> PPOConfig:
    """Returns the configuration of the supervised training.

    Args:
        files: in place of `sft.files`; empty: those.

    Raises:
        ConfigError: there is nothing to learn from.
    """
    own = config.section(SFTSettings)
    named = tuple(files) or own.files
    if not named:
        raise ConfigError(["--sft has nothing to learn from: name a file, --sft DATA.jsonl"])
    quiet = build(config, _settings(config, named))
    policy = config.actor_rollout_ref
    optim = policy.actor.optim
    actor = replace(
        policy.actor,
        ppo_mini_batch_size=own.batch_size,
        ppo_epochs=1,
        shuffle=False,
        use_kl_loss=False,
        policy_loss=PolicyLossChoice(),
        router_replay=RouterReplayConfig(),
        optim=replace(optim, lr=own.lr or optim.lr),
    )
    return replace(
        quiet,
        actor_rollout_ref=replace(policy, actor=actor),
        critic=CriticConfig(enable=False),
        reward_model=RewardModelConfig(),
        custom_reward_function=CustomRewardFunctionConfig(),
        algorithm=AlgorithmConfig(adv_estimator="reinforce_plus_plus"),
        data=replace(quiet.data, sampler=SamplerConfig()),
    )


def _settings(config: PPOConfig, files: tuple[str, ...]) -> dict[str, Any]:
    """Lists, by key, what a supervised training sets."""
    own = config.section(SFTSettings)
    return {
        "sft.files": files,
        "sft.loss_coef": 0.0,
        "data.train_batch_size": own.batch_size,
        # The longest row, which budgets of tokens must hold, is that of the data.
        "data.max_response_length": max(max_length_of(config) - config.data.max_prompt_length, 1),
        "agent.agent_length": None,
        "agent.max_turn_tokens": None,
        "agent.observation_loss_coef": 0.0,
        "records.keep_gib": 0.0,
        "alarms.mode": "off",
        "trainer.default_local_dir": str(sft_folder(config)),
        "trainer.total_epochs": own.epochs,
        "trainer.total_training_steps": own.steps,
        "trainer.total_sampled_tokens": None,
        # A run whose model is kept nowhere would be for nothing.
        "trainer.save_freq": None if config.trainer.save_freq == -1 else config.trainer.save_freq,
        "trainer.rollout_n_gpus": 0,
        "trainer.async_level": 0,
        "trainer.train_finished_groups": False,
        "trainer.critic_warmup": 0,
        "trainer.val_only": False,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
    }
