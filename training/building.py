"""Builds a trainer from a config, and from what a program has as objects.

Invariant: `python main.py` and Python users come through here, so that both train the same.
"""

import logging
from collections.abc import Mapping
from typing import Any

import transformers
from transformers import PreTrainedTokenizerBase

from custom.envs.dataset_row import DatasetRowEnvironment
from custom.model_usage import USAGE
from custom.tools import load_tools
from data.chat_templates import require_template
from data.loading import load_extern_object
from data.prompt_files import read_rows
from data.rl_dataset import create_dataset, keep_fitting, measures_prompts
from data.shared_rows import warn_of_shared_rows
from data.turn_tokens import TurnTokens
from data.watchdog import beat
from training.agent_trainer import AgentTrainer
from training.algorithm_trial import try_algorithm
from training.config import DataConfig, ModelConfig, PPOConfig
from training.config.loader import ConfigError, read_config
from training.config.resources.user_code import load_custom_algorithm
from training.config.side_services import side_services, tool_sources
from training.core_algos import load_built_in
from training.ray_trainer import RayPPOTrainer
from training.reward import RewardFunction, load_reward_manager
from training.reward_trial import try_reward
from workers.ranks.memory import keep_heap, limit_caches

logger = logging.getLogger(__name__)

# Arguments of the trainer's that bring an environment, or its agents.
ACTING = frozenset({"specs", "agent_cls"})
# Answers of each data source that a reward manager prints at each call.
SHOWN_IN_TRAINING = 0
SHOWN_IN_VALIDATION = 1


def build_trainer(
    config: PPOConfig | Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: Any,
) -> RayPPOTrainer:
    """Builds the trainer of this config, with datasets, reward functions and workers' classes.

    No model is loaded yet. Estimator and policy loss are tried (`try_algorithm`), and the reward
    function of prompts (`try_reward`).

    Args:
        config: typed, or an OmegaConf or a mapping (see `read_config`).
        tokenizer: None: the model's.
        kwargs: arguments of the trainer's, in place of what the config says: train_dataset,
            reward_fn, specs, ...; None: as the config says.
    """
    arguments = {name: value for name, value in kwargs.items() if value is not None}
    brings_agents = not ACTING.isdisjoint(arguments)
    own_data = brings_agents or "train_dataset" in arguments
    config = read_config(config, own_data=own_data, own_agents=brings_agents)
    limit_caches()
    keep_heap()
    # An edit in place that cannot be is told here, and not in the first step.
    load_built_in()
    for service in side_services(config):
        service.set_up()
        service.try_out(config)
    if config.custom_algorithm:
        load_custom_algorithm(config.custom_algorithm)
    try_algorithm(config)
    if tokenizer is None:
        tokenizer = _load_tokenizer(config.actor_rollout_ref.model)
    _require_template(tokenizer, config.data)
    acts = bool(config.environments) or brings_agents
    data = config.data
    arguments |= _read_datasets(config, tokenizer, set(arguments), acts, brings_agents)
    if data.train_files and data.val_files:
        warn_of_shared_rows(arguments["train_dataset"], arguments["val_dataset"], data.prompt_key)
    has_rows = "train_dataset" in arguments
    if data.sampler.class_path and has_rows and "train_sampler" not in arguments:
        sampler_cls = load_extern_object(data.sampler.class_path, str(data.sampler.class_name))
        arguments["train_sampler"] = sampler_cls(arguments["train_dataset"], data)
    if acts and (brings_agents or not config.plays_dataset_rows):
        return AgentTrainer(config, tokenizer, **arguments)
    arguments |= _reward_functions(
        config, tokenizer, arguments.get("reward_fn"), arguments.get("val_reward_fn")
    )
    trainer_class = AgentTrainer if acts else RayPPOTrainer
    trainer = trainer_class(config, tokenizer, **arguments)
    try_reward(trainer)
    # The trial's questions to models belong to no step.
    USAGE.take()
    return trainer


def _read_datasets(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    given: set[str],
    acts: bool,
    brings_agents: bool,
) -> dict[str, Any]:
    """Reads the rows of training and validation that the caller has not given.

    Args:
        given: names of the trainer's arguments that are there.
        acts: the run plays in environments; brings_agents: the caller gives their agents.
    """
    data = config.data
    files_and_limits = {
        "train_dataset": (data.train_files, data.train_max_samples),
        "val_dataset": (data.val_files, data.val_max_samples),
    }
    datasets: dict[str, Any] = {}
    for name, (files, most) in files_and_limits.items():
        if not files or name in given:
            continue
        if not acts:
            datasets[name] = create_dataset(files, data, tokenizer, None, most)
        elif config.plays_dataset_rows and not brings_agents:
            datasets[name] = _read_rows_with_tools(files, config, tokenizer, most)
        else:
            datasets[name] = read_tasks(files, data, most)
            _warn_of_unfiltered(files, data)
    return datasets


def _warn_of_unfiltered(files: tuple[str, ...], data: DataConfig) -> None:
    """Warns where the rows of an environment's tasks are not filtered by their lengths."""
    if data.filter_overlong_prompts:
        logger.warning(
            "data.filter_overlong_prompts drops no row of %s: an environment makes its prompts",
            ", ".join(files),
        )


def _load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that lies beside the policy's weights."""
    try:
        return transformers.AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [
                f"actor_rollout_ref.model.path={model.path}: its tokenizer cannot be loaded "
                f"({reason}): save the model's tokenizer into that folder"
            ]
        ) from error


def _require_template(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
    """Raises ConfigError where the chat template is no Jinja."""
    try:
        require_template(tokenizer, data.apply_chat_template_kwargs)
    except ValueError as error:
        raise ConfigError([str(error)]) from error


def _read_rows_with_tools(
    files: tuple[str, ...], config: PPOConfig, tokenizer: PreTrainedTokenizerBase, most: int
) -> Any:
    """Reads at most so many rows (-1: all) that are played with tools, and keeps those that fit.

    A prompt's tokens are those of its first turn: messages and the tools' schemas.
    """
    data = config.data
    rows = read_tasks(files, data, most)
    if data.custom_cls.path is not None or not measures_prompts(data):
        return rows
    tokens = TurnTokens(
        tokenizer,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        eos_token_ids=[tokenizer.eos_token_id],
    )
    tools = load_tools((*config.agent.tools, *tool_sources(config)))
    environment = DatasetRowEnvironment(data.prompt_key)
    schemas = tools.schemas()
    tools.close()
    lengths = []
    for row in rows:
        beat("a prompt read")
        lengths.append(len(tokens.prompt(environment.reset(**row), schemas)))
    origins = [f"row {number} of {', '.join(files)}" for number in range(len(rows))]
    return keep_fitting(rows, lengths, origins, data)


def _reward_functions(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: RewardFunction | None,
    val_reward_fn: RewardFunction | None,
) -> dict[str, RewardFunction]:
    """Returns training's and validation's: those given, training's for both, or the config's."""
    if val_reward_fn is None:
        val_reward_fn = reward_fn
    if reward_fn is None:
        reward_fn = load_reward_manager(config, tokenizer, num_examine=SHOWN_IN_TRAINING)
    if val_reward_fn is None:
        val_reward_fn = load_reward_manager(config, tokenizer, num_examine=SHOWN_IN_VALIDATION)
    return {"reward_fn": reward_fn, "val_reward_fn": val_reward_fn}


def read_tasks(files: tuple[str, ...], data: DataConfig, most: int) -> Any:
    """Reads the rows that an environment's `reset` is given, at most so many (-1: all).

    They are taken as they are, or by `data.custom_cls`.
    """
    if data.custom_cls.path is not None:
        return create_dataset(files, data, None, None, most)
    rows = [row for file in files for row in read_rows(file)]
    if most < 0:
        return rows
    return rows[:most]
