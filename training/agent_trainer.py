"""AgentTrainer: the same step as RayPPOTrainer's, with episodes in an environment instead of answers to prompts.

A step plays `agent.agent_length` x `rollout.n` fresh episodes; the environment gives the rewards. There is no dataset,
and an epoch is one step. Invariant: what an episode faces follows from (run seed, step, number in the step), so that a
resumed run meets what it would have met.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from custom.agent import AgentSpec
from data.protocol import DataProto
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from training.ray_trainer import RayPPOTrainer
from training.reward import RewardFunction
from training.run.episodes import environment_name, episode_metrics, write_episodes
from training.run.metric_utils import StepTimer
from training.run.roles import ResourcePoolManager, Role
from workers.environments.env_server import StepReply
from workers.environments.pool import EnvironmentPool
from workers.multi_turn_rollout import SyncMultiTurnRollout, agent_specs, describe_episodes, open_pool

logger = logging.getLogger(__name__)
CLOSING_S = 15.0  # for the environments to be closed at a run's end


def environment_rewards(data: DataProto) -> Tensor:
    """Returns what the environments gave, (B, R), each reward on the last sampled token of its turn."""
    data.require("environment_rewards", by="environment_rewards")
    return data.batch["environment_rewards"]


class Slots(Dataset):
    """Stands for a dataset of episodes: row i says that there is an i-th."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, int]:
        return {"slot": i}


def collate_slots(rows: list[dict[str, int]]) -> dict[str, np.ndarray]:
    """Joins the rows of `Slots`."""
    return {"slot": np.array([row["slot"] for row in rows])}


class AgentTrainer(RayPPOTrainer):
    """Trains by PPO and its relatives on episodes.

    Args:
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one around the environment.
        specs: how agents are built, one for each environment; None: as the config says.
        reward_fn, val_reward_fn: None: what the environment, or `custom_reward_function`, gave.
        The rest as RayPPOTrainer's.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: Mapping[Role, type] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        agent_cls: type | None = None,
        *,
        specs: Sequence[AgentSpec] | None = None,
        reward_fn: RewardFunction | None = None,
        val_reward_fn: RewardFunction | None = None,
        processor: object = None,
        **kwargs: Any,
    ) -> None:
        self.specs = list(specs) if specs is not None else agent_specs(config, agent_cls)
        self.names = [environment_name(spec) for spec in self.specs]
        kwargs.setdefault("train_dataset", Slots(config.prompts_per_step))
        if config.agent.val_length:
            kwargs.setdefault("val_dataset", Slots(config.agent.val_length))
        super().__init__(
            config,
            tokenizer,
            role_worker_mapping,
            resource_pool_manager,
            reward_fn=reward_fn or environment_rewards,
            val_reward_fn=val_reward_fn or environment_rewards,
            **kwargs,
        )
        self.processor = processor
        self.multi_turn_rollout: SyncMultiTurnRollout | None = None
        # Facts of a step's episodes, also of those that are filtered out.
        self.played: list[dict[str, Any]] = []

    def _collator(self, collate_fn: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        return collate_slots

    def init_workers(self) -> None:
        try_agents(self.config, self.specs, self.tokenizer)
        super().init_workers()
        self.multi_turn_rollout = SyncMultiTurnRollout(
            self.actor_rollout_wg, self.config, self.tokenizer, self.processor, specs=self.specs
        )

    def shutdown(self) -> None:
        """Closes the environments, then as RayPPOTrainer does."""
        # Workers that are busy, or gone, close nothing; their environments then end with them.
        closing = threading.Thread(target=self._close_environments, daemon=True)
        closing.start()
        closing.join(CLOSING_S)
        super().shutdown()

    def _close_environments(self) -> None:
        try:
            if self.multi_turn_rollout is not None:
                self.multi_turn_rollout.close()
        # A worker may be gone.
        except Exception as error:
            logger.warning("environments were not closed: %s", error)

    def prompt_batch(
        self, rows: dict[str, Any], repeat: int, first_group: int = 0, validate: bool = False
    ) -> DataProto:
        return describe_episodes(
            len(rows["slot"]),
            repeat,
            step=self.global_steps,
            seed=self.seed,
            first_group=first_group,
            validate=validate,
            seeded=self.config.trainer.deterministic,
            names=self.names,
        )

    def _generate_multi_turn_sequences(self, gen_batch: DataProto) -> DataProto:
        """Plays the described episodes, over any number of turns."""
        assert self.multi_turn_rollout is not None, "init_workers makes it"
        self.multi_turn_rollout.reset(gen_batch)
        facts = self.multi_turn_rollout.rollout()
        if not gen_batch.meta_info["validate"]:
            self.played += facts
        batch = self.multi_turn_rollout.build_update_batch()
        if folder := self.config.agent.episodes_dir:
            try:
                write_episodes(Path(folder), batch)
            # A full disk costs the records, not the run.
            except OSError as error:
                logger.warning(
                    "episodes of step %d were not written to agent.episodes_dir: %s", self.global_steps, error
                )
        return batch

    def _step_metrics(self, batch: DataProto, timer: StepTimer) -> dict[str, float]:
        played, self.played = self.played, []
        return super()._step_metrics(batch, timer) | episode_metrics(played)


def try_agents(config: PPOConfig, specs: Sequence[AgentSpec], tokenizer: PreTrainedTokenizerBase) -> None:
    """Builds and resets an agent of each environment, and checks the chat template, before any model is loaded.

    Raises:
        ValueError: an environment cannot be built or reset, its first prompt is too long, or the template cannot
            continue a conversation.
    """
    tokens = TurnTokens(
        tokenizer, template_kwargs=dict(config.data.apply_chat_template_kwargs), eos_token_ids=[tokenizer.eos_token_id]
    )
    with open_pool(config, specs) as pool:
        for index, tools in enumerate(pool.tool_schemas):
            tokens.check_template(tools=tools)
            pool.reset(index, index, config.data.run_seed)
            reply = wait_for_reply(pool)
            name = environment_name(specs[index])
            if reply.failure:
                raise ValueError(f"environment {name} failed in its first reset ({reply.failure}): {reply.error}")
            length, most = len(tokens.prompt(reply.messages, tools)), config.data.max_prompt_length
            if length > most:
                raise ValueError(
                    f"environment {name}: a first prompt has {length} tokens, data.max_prompt_length={most}: raise it, "
                    "or shorten the observation"
                )


def wait_for_reply(pool: EnvironmentPool) -> StepReply:
    """Waits for the reply to the one call that was made."""
    while not (answers := pool.poll(1.0)):
        pass
    return answers[0][1]
