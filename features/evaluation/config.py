"""Makes of a training's configuration that of an evaluation: what trains is left out of it.

Invariant: what the policy is given, how it is sampled and how it is paid stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import PPOConfig
from training.config.leaves import build
from training.config.loader import ConfigError
from training.config.schema.actor import ActorConfig
from training.config.schema.algorithm import AlgorithmConfig
from training.config.schema.critic import CriticConfig
from training.config.schema.data import SamplerConfig
from training.config.schema.policy import RefConfig
from training.config.schema.rollout import RolloutConfig, ValKwargs

if TYPE_CHECKING:
    # It imports torch.
    from features.evaluation.evaluated_model import EvaluatedModel

logger = logging.getLogger(__name__)

# An episode passes from this reward on.
PASS_REWARD = 1.0
ROLLOUT = "actor_rollout_ref.rollout"
DO_SAMPLE = f"{ROLLOUT}.val_kwargs.do_sample"
# Engines that would read weights from a folder that has none, but for this.
DUMMY_WEIGHTS = {"load_format": "dummy"}


def evaluation_config(config: PPOConfig, model: EvaluatedModel, out: Path) -> PPOConfig:
    """Returns the configuration that evaluates a model into the folder `out`.

    It has neither critic nor reference, and one estimator of no needs, so that the checks ask for
    nothing that training alone would need.
    """
    policy = config.actor_rollout_ref
    # It cuts what is never trained on; a full row must fit all the same.
    budget = max(ActorConfig().ppo_max_token_len_per_gpu, config.data.row_length)
    # A step, which is never made, of one prompt, whose rows divide among the ranks.
    rollout = replace(
        policy.rollout,
        n=config.trainer.num_ranks,
        engine_kwargs=_engine_kwargs(policy.rollout, model),
    )
    if model.weights.form != "adapters":
        rollout = replace(rollout, lora_as_adapter=False)
    quiet = build(config, _settings(config, out))
    return replace(
        quiet,
        actor_rollout_ref=replace(
            policy,
            model=model.settings,
            actor=ActorConfig(ppo_max_token_len_per_gpu=budget),
            ref=RefConfig(),
            rollout=rollout,
        ),
        critic=CriticConfig(enable=False),
        algorithm=AlgorithmConfig(adv_estimator="reinforce_plus_plus"),
        data=replace(quiet.data, sampler=SamplerConfig()),
    )


def _settings(config: PPOConfig, out: Path) -> dict[str, Any]:
    """Lists, by key, what an evaluation sets."""
    return {
        "data.train_files": config.data.val_files,
        "data.train_max_samples": config.data.val_max_samples,
        "data.train_batch_size": 1,
        "agent.agent_length": None,
        "agent.observation_loss_coef": 0.0,
        "records.folder": str(out / "episodes"),
        "trainer.default_local_dir": str(out),
        "trainer.total_training_steps": 1,
        "trainer.rollout_n_gpus": 0,
        "trainer.async_level": 0,
        "trainer.train_finished_groups": False,
        "alarms.mode": "off",
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_only": True,
        "trainer.critic_warmup": 0,
        "trainer.resume_mode": "disable",
        "trainer.resume_from_path": None,
        "trainer.resume_with_changes": False,
        "trainer.rollout_data_dir": None,
        "trainer.validation_data_dir": None,
        "supervisor.max_restarts": 0,
    }


def _engine_kwargs(rollout: RolloutConfig, model: EvaluatedModel) -> dict[str, dict[str, Any]]:
    """Returns what is passed on to engines, with no weights to read where the folder has none."""
    kwargs = dict(rollout.engine_kwargs)
    own = dict(kwargs.get(rollout.name, {}))
    starts_one = rollout.name in ("vllm", "sglang") and "base_url" not in own
    if starts_one and model.weights.form == "checkpoint":
        kwargs[rollout.name] = DUMMY_WEIGHTS | own
    return kwargs


def with_samples(
    config: PPOConfig, n: int | None, sources: Mapping[str, str] | None = None
) -> PPOConfig:
    """Returns the config with `n` samples of each task; None: as `val_kwargs` says.

    Several samples are drawn as training draws them, unless `val_kwargs` itself samples: greedy
    answers would be one answer n times.

    Args:
        sources: where the config's values come from, as `LoadedConfig` has it.
    Raises:
        ConfigError: the command line asks for several greedy answers to prompts.
    """
    if n is None:
        return config
    if n < 1:
        raise ConfigError([f"--n {n}: give a number of samples of each task, 1 or more"])
    rollout = config.actor_rollout_ref.rollout
    settings = replace(rollout.val_kwargs, n=n)
    if n > 1 and not settings.do_sample:
        settings = _sampled(config, settings, (sources or {}).get(DO_SAMPLE))
    policy = replace(config.actor_rollout_ref, rollout=replace(rollout, val_kwargs=settings))
    return replace(config, actor_rollout_ref=policy)


def _sampled(config: PPOConfig, settings: ValKwargs, source: str | None) -> ValKwargs:
    """Returns validation's sampling with the training's temperature, where greedy was not meant."""
    if source == "command line":
        # Environments may differ from one episode to the next.
        if config.environments:
            return settings
        raise ConfigError(
            [
                f"--n {settings.n} with {DO_SAMPLE}=false gives one greedy answer {settings.n} "
                "times: leave that out, which samples at the training's temperature, or set it to "
                f"true, with {ROLLOUT}.val_kwargs.temperature above 0"
            ]
        )
    rollout = config.actor_rollout_ref.rollout
    logger.info(
        "--n %d: greedy answers would be equal, so samples are drawn as in training: temperature "
        "%g, top_p %g, top_k %d; %s=true and the settings beside it choose others",
        settings.n,
        rollout.temperature,
        rollout.top_p,
        rollout.top_k,
        DO_SAMPLE,
    )
    return replace(
        settings,
        do_sample=True,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def require_tasks(config: PPOConfig) -> None:
    """Raises ConfigError where there is nothing to evaluate on; says what to set."""
    if config.data.val_files or (config.environments and config.agent.val_length):
        return
    fix = "data.val_files=[FILE.parquet], the rows that are to be answered"
    if config.environments:
        fix = "agent.val_length=100, so many tasks, or data.val_files, whose rows are the tasks"
    raise ConfigError([f"there is nothing to evaluate on: set {fix}"])
