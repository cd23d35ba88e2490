"""Trains on episodes in an environment: the step is RayPPOTrainer's, with episodes for answers.

A step plays `agent.agent_length` x `rollout.n` fresh episodes; the environment gives the rewards.
Without a dataset an epoch is one step; the rows of one are the environment's tasks,
`reset(seed, **row)`. Before any model is loaded environments are tried (`environment_trial.py`).
Invariant: what an episode faces follows from (run seed, step, number in the step), so that a
resumed run meets what it would have met.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from custom.agent import AgentSpec
from custom.env_suite import EnvironmentSuite
from data.learning_sampler import TASK_INDEX
from data.loading import load_extern_object
from data.plain_state import kept_state
from data.protocol import DataProto
from training.config import PPOConfig
from training.config.leaves import anchored
from training.config.loader import read_config
from training.config.side_services import side_services
from training.environment_trial import try_agents
from training.episode_batches import (
    add_row_columns,
    as_tasks,
    environment_rewards,
    given_tasks,
)
from training.ray_trainer import Collate, RayPPOTrainer
from training.run.abort_policy import FailureWatch, require_same_tasks
from training.run.checkpoint_contents import DriverState
from training.run.data_position import Rows
from training.run.metrics.episode_metrics import episode_metrics
from training.run.roles import ResourcePoolManager, Role
from training.run.step_timer import StepTimer
from workers.agent_specs import agent_specs
from workers.environments.names import environment_name, environment_source
from workers.model.builder import ModelSpec
from workers.multi_turn_rollout import SyncMultiTurnRollout
from workers.rollout.episode_descriptions import describe_episodes
from workers.rollout.kinds import EpisodeSpec

# Validation shows those episode metrics too whose names begin with one of these.
VALIDATION_METRICS = (
    "agent/episodes",
    "agent/failed",
    "agent/retries",
    "agent/cut_turns",
    "agent/ending/",
)
EpisodeFacts = Mapping[str, Any]


class AgentTrainer(RayPPOTrainer):
    """Trains by PPO and its relatives on episodes.

    Args:
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one around the
            environment.
        specs: how agents are built, one for each environment; None: as the config says.
        reward_fn, val_reward_fn: None: what the environment, or `custom_reward_function`, gave.
        kwargs: the rest, as RayPPOTrainer's.
    """

    def __init__(
        self,
        config: PPOConfig | Any,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        agent_cls: type | None = None,
        *,
        specs: Sequence[EpisodeSpec] | None = None,
        **kwargs: Any,
    ) -> None:
        brings_agents = bool(specs or agent_cls)
        config = read_config(config, own_data=True, own_agents=brings_agents)
        config = anchored(config).with_correction
        self.specs = agent_specs(config, agent_cls) if specs is None else list(specs)
        self.specs = [
            replace(spec, services=side_services(config)) if isinstance(spec, AgentSpec) else spec
            for spec in self.specs
        ]
        if not self.specs:
            raise ValueError(
                "AgentTrainer has nothing to act in: set agent.environment, or give agent_cls or "
                "specs"
            )
        self.suite = make_suite(config, self.specs)
        self.failures = FailureWatch(
            config.agent.max_failure_rate,
            [environment_source(spec.source) for spec in self.specs],
        )
        defaults = {
            "reward_fn": environment_rewards,
            "val_reward_fn": environment_rewards,
            "train_dataset": range(config.prompts_per_step),
            "val_dataset": range(config.agent.val_length) or None,
        }
        for name, default in defaults.items():
            if not kwargs.get(name):
                kwargs[name] = default
        super().__init__(config, tokenizer, role_worker_mapping, resource_pool_manager, **kwargs)

    def _collator(self, collate_fn: Collate) -> Callable[..., Rows]:
        return as_tasks

    # Workers

    def init_workers(self) -> None:
        """Tries the environments, builds the workers, and opens the environment pools."""
        self.open_run()
        dataset: Any = self.train_dataloader.dataset
        first_task = as_tasks([dataset[0]])["task"][0]
        model = self.config.actor_rollout_ref.model
        # Those at which the run's engine stops sampling.
        stops = ModelSpec(model, str(model.path), torch.device("cpu")).eos_token_ids
        try_agents(self.config, self.specs, self.tokenizer, first_task, stops)
        super().init_workers()
        self.multi_turn_rollout = SyncMultiTurnRollout(
            self.rollout_wg, self.config, self.tokenizer, self.processor, specs=self.specs
        )

    # Episodes

    def prompt_batch(
        self,
        rows: Rows,
        repeat: int,
        first_group: int = 0,
        validate: bool = False,
        step: int | None = None,
    ) -> DataProto:
        """Describes `repeat` episodes of each row's task: B = tasks x repeat."""
        tasks = rows["task"]
        described = describe_episodes(
            len(tasks),
            repeat,
            self._step_info(validate, step),
            first_group=first_group,
            suite=self.suite,
            tasks=tasks,
            given=given_tasks(rows),
        )
        if TASK_INDEX in rows:
            described.non_tensor_batch[TASK_INDEX] = rows[TASK_INDEX].repeat(repeat)
        # What else plays episodes, such as a replay, has no branches of them played.
        described.meta_info["trains"] = not validate
        if self.config.plays_dataset_rows:
            add_row_columns(described)
        if self.multi_turn_rollout is not None:
            self.multi_turn_rollout.wanted = described
        return described

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        """Plays the described episodes, over any number of turns.

        In a subclass `reset()` without a batch takes the same episodes.
        """
        assert self.multi_turn_rollout is not None, "init_workers makes it"
        rollout = self.multi_turn_rollout
        if self.config.trainer.async_level:
            # Several steps may be played at once.
            rollout = copy(rollout)
        rollout.reset(gen_batch)
        rollout.rollout()
        return rollout.build_update_batch()

    def play(self, prompts: DataProto) -> DataProto:
        """Plays the described episodes.

        Raises:
            EnvironmentsFail: the members of a group faced different tasks.
        """
        batch = super().play(prompts)
        # Observers have it before, whose records show the difference.
        if not self.config.agent.allow_different_tasks:
            facts = batch.non_tensor_batch.get("episode_facts", ())
            require_same_tasks([each for each in facts if each is not None], self.suite.names)
        return batch

    def _is_paid_by_environment(self, *, validate: bool) -> bool:
        """Checks whether the environment's rewards are the scores, and nothing else is."""
        reward_fn = self.val_reward_fn if validate else self.reward_fn
        return reward_fn is environment_rewards and not self.config.reward_model.enable

    def on_restored(self, batch: DataProto) -> None:
        """Keeps the facts of episodes that a checkpoint had in flight, for their step's metrics."""
        facts = batch.non_tensor_batch.get("episode_facts")
        if facts is not None:
            training = (False, batch.meta_info["global_steps"])
            self.multi_turn_rollout.facts[training] = [
                episode for episode in facts if episode is not None
            ]

    # Metrics

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        episodes = self.multi_turn_rollout.take_facts(step=self.global_steps)
        self.failures.check(episodes)
        names = self.suite.names
        metrics = super()._step_metrics(batch, timer) | episode_metrics(episodes, names)
        if len(names) > 1:
            for name, weight in zip(names, self.suite.weights, strict=True):
                metrics[f"env/{name}/weight"] = weight
        self.suite.update(self._rewards_by_environment(episodes))
        return metrics

    def _rewards_by_environment(self, episodes: Sequence[EpisodeFacts]) -> dict[str, list[float]]:
        """Lists the rewards of each environment's episodes, without those that are masked."""
        rewards: dict[str, list[float]] = defaultdict(list)
        for episode in episodes:
            if not episode["masked"]:
                name = self.suite.names[episode["environment"]]
                rewards[name].append(episode["reward"])
        return dict(rewards)

    def validate(self) -> dict[str, float]:
        """Plays the validation episodes; returns their rewards, and how the episodes ended."""
        metrics = super().validate()
        if self.multi_turn_rollout is None:
            return metrics
        episodes = self.multi_turn_rollout.take_facts(validate=True)
        return metrics | validation_endings(episodes, self.suite.names)

    # Checkpoints

    def driver_state(self) -> DriverState:
        """Returns the entries of a checkpoint's `data.pt`, the suite's among them."""
        suite = kept_state(self.suite.state_dict(), "the suite's state_dict()")
        return replace(super().driver_state(), suite=suite)

    def load_driver_state(self, state: DriverState) -> None:
        """Goes on from a checkpoint's `driver_state`."""
        super().load_driver_state(state)
        if state.suite is not None:
            self.suite.load_state_dict(state.suite)


def validation_endings(episodes: Sequence[EpisodeFacts], names: Sequence[str]) -> dict[str, float]:
    """Computes how a validation's episodes ended; none without episodes."""
    if not episodes:
        return {}
    metrics = {}
    for name, value in episode_metrics(episodes, names).items():
        if name.startswith(VALIDATION_METRICS):
            metrics[f"val-aux/{name}"] = value
    return metrics


def make_suite(config: PPOConfig, specs: Sequence[EpisodeSpec]) -> EnvironmentSuite:
    """Makes the suite of the config's environments, of `agent.suite`'s class where there is one."""
    names: list[str] = []
    for spec in specs:
        name = environment_name(spec.source)
        # The same environment with other settings.
        same = [other for other in names if other.partition("#")[0] == name]
        names.append(f"{name}#{len(same) + 1}" if same else name)
    weights = [choice.weight for choice in config.environments]
    if len(weights) != len(names):
        weights = [1.0] * len(names)
    custom = config.agent.suite
    if custom.path is None:
        return EnvironmentSuite(names, weights)
    return load_extern_object(custom.path, str(custom.name))(names, weights)
