"""Episodes of agents as training batches: the worker's side, beside the engine, and the driver's, under the name its users know.

The driver describes episodes (who plays, with which seed) and gets rows back; environments, conversations and tokens stay where the engine is.
Each description is a row without tensors; an episode gives one row, or more where the model's chat template rewrites history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from custom.agent import AgentSpec
from data.containers import object_array
from data.protocol import DataProto
from data.sample_ids import sample_ids, step_info
from data.seeding import seed_for
from data.turn_tokens import TurnTokens
from training.config import PPOConfig
from workers.environments.env_server import StepReply
from workers.environments.pool import EnvironmentPool
from workers.rollout.base import BaseRollout, pad_right
from workers.rollout.episode import FAILURES, Episode, Turn, TurnLimits
from workers.rollout.turn_loop import TurnLoop


class AgentRollout:
    """The worker's side.

    Args:
        config: the run's.
        engine: of this rank; with tensor parallelism one of several ranks that share it.
        tokenizer: the policy's.
        specs: how each environment's agents are built.
        group: the ranks that share the engine; their first holds the environments. None for one.
    """

    def __init__(
        self,
        config: PPOConfig,
        engine: BaseRollout,
        tokenizer: Any,
        specs: Sequence[AgentSpec],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config, self.engine, self.group = config, engine, group
        self.tokens = TurnTokens(
            tokenizer,
            template_kwargs=dict(config.data.apply_chat_template_kwargs),
            eos_token_ids=engine.eos_token_ids,
        )
        self.pool: EnvironmentPool | None = None
        schemas: list[Any] = [None]
        if group is None or dist.get_rank(group) == 0:
            self.pool = open_pool(config, specs)
            schemas = [self.pool.tool_schemas]
        if group is not None:
            dist.broadcast_object_list(schemas, src=dist.get_global_rank(group, 0), group=group)
        self.tools: list[list[dict[str, Any]] | None] = schemas[0]

    def run(self, described: DataProto) -> DataProto:
        """Plays the described episodes; see `rows_of` for what comes back."""
        self.engine.begin()
        columns = described.non_tensor_batch
        episodes = [
            Episode(
                group=int(columns["group_index"][i]),
                sample=int(columns["sample_index"][i]),
                spec=int(columns["agent_index"][i]) % len(self.tools),
                seed=int(columns["env_seed"][i]),
            )
            for i in range(len(described))
        ]
        own_process = self.config.agent.environment.isolation != "thread"
        loop = TurnLoop(
            self.engine,
            self.engine.sampler(described.meta_info),
            self.limits(),
            tokens=self.tokens,
            environments=self.pool,
            tools=self.tools,
            lockstep=bool(described.meta_info.get("seeded")),
            max_live=self.config.agent.environment.num_workers if own_process else None,
            group=self.group,
        )
        loop.run(episodes)
        return self.rows_of(described, episodes)

    def limits(self) -> TurnLimits:
        agent, data = self.config.agent, self.config.data
        return TurnLimits(
            prompt_length=data.max_prompt_length,
            response_length=self.engine.response_length,
            max_model_len=self.engine.max_model_len,
            max_turn=agent.max_turn,
            max_turn_tokens=agent.max_turn_tokens,
            max_refills=agent.max_refills if agent.on_failure == "refill" else 0,
        )

    def rows_of(self, described: DataProto, episodes: Sequence[Episode]) -> DataProto:
        """The episodes' rows in order: what `build_batch` gives, `environment_rewards` (B, R), the description's columns, `ending`,
        `episode_row` (number of the row in its episode) and `episode_facts` (a dict in each episode's first row, None in others).
        """
        facts = [episode_facts(episode) for episode in episodes]
        if self.config.agent.episodes_dir is not None:
            for fact, episode in zip(facts, episodes, strict=True):
                fact["record"] = episode_record(episode)
        for episode in episodes:
            settle_failure(episode, self.config.agent.on_failure)
        owners = [(number, k) for number, episode in enumerate(episodes) for k in range(len(episode.rows))]
        rows = [episodes[number].rows[k] for number, k in owners]
        batch = self.engine.build_batch(rows, self.config.data.max_prompt_length)
        width = self.engine.response_length
        batch.batch["environment_rewards"] = pad_right([row.rewards for row in rows], width, 0.0)
        index = np.array([number for number, _ in owners], dtype=np.int64)
        columns = {name: values[index] for name, values in described.non_tensor_batch.items()}
        columns["ending"] = object_array([episodes[number].ending for number, _ in owners])
        columns["episode_row"] = np.array([k for _, k in owners], dtype=np.int64)
        columns["episode_facts"] = object_array([facts[number] if k == 0 else None for number, k in owners])
        batch.non_tensor_batch = columns
        batch.meta_info = dict(described.meta_info)
        return batch

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


def open_pool(config: PPOConfig, specs: Sequence[AgentSpec]) -> EnvironmentPool:
    """The environments' home as the config wants it."""
    agent = config.agent
    return EnvironmentPool(
        specs,
        isolation=agent.environment.isolation,
        num_workers=agent.environment.num_workers,
        step_timeout_s=agent.step_timeout_s,
        episode_timeout_s=agent.episode_timeout_s,
    )


def settle_failure(episode: Episode, on_failure: str) -> None:
    """What becomes of a failed episode's rows: their rewards are zeroed, or nothing of them is trained on.

    With `refill` it is only an episode that crashed to the last attempt that is masked: a timeout may well be the policy's doing, and to leave it out
    would reward it for that.
    """
    if episode.ending not in FAILURES:
        return
    masked = on_failure == "mask" or (on_failure == "refill" and episode.ending != "env_timeout")
    for row in episode.rows:
        row.rewards = [0.0] * len(row.rewards)
        if masked:
            row.response_mask = [0] * len(row.response_mask)
            row.turn_ids = [-1] * len(row.turn_ids)


def episode_facts(episode: Episode) -> dict[str, Any]:
    """What the step's metrics need to know of an episode; seconds of wall time."""
    return {
        "ending": episode.ending,
        "error": episode.error,
        "turns": len(episode.turns),
        "attempts": episode.attempt + 1,
        "cut_turns": sum(turn.finish_reason == "length" for turn in episode.turns),
        "env_seconds": episode.env_seconds,
        "seconds": episode.seconds,
        "tool_calls": [call for turn in episode.turns if turn.reply for call in turn.reply.tool_calls],
    }


def episode_record(episode: Episode) -> dict[str, Any]:
    """All of an episode, as JSON holds it: what was said, the ids, and what came of it."""
    return {
        "attempt": episode.attempt,
        "initial_messages": episode.initial_messages,
        "turns": [turn_record(turn) for turn in episode.turns],
        "rows": [asdict(row) for row in episode.rows],
    }


def turn_record(turn: Turn) -> dict[str, Any]:
    """A turn, as JSON holds it; `done` is null where the environment gave no reply."""
    reply = turn.reply or StepReply()
    return {
        "text": turn.text,
        "reward": reply.reward or 0.0,
        "finish_reason": turn.finish_reason,
        "observation": reply.messages,
        "done": None if turn.reply is None else reply.done,
        "env_seconds": reply.seconds,
        "tool_calls": reply.tool_calls,
    }


def agent_specs(config: PPOConfig, agent_cls: type | None = None) -> list[AgentSpec]:
    """How the config's agents are built, one spec for each of its environments; `agent_cls` wins over `agent.cls`."""
    agent, reward = config.agent, config.custom_reward_function
    return [
        AgentSpec(
            environment=environment.name or f"{environment.path}:{environment.cls}",
            kwargs=dict(environment.kwargs),
            agent_path=None if agent_cls else agent.cls.path,
            agent_name=agent.cls.name or "Agent",
            agent_cls=agent_cls,
            tools=tuple(agent.tools),
            parser=agent.parser,
            include_state=agent.include_state,
            prompt_template=environment.prompt_template,
            max_observation_chars=agent.max_observation_chars,
            reward_path=reward.path,
            reward_name=reward.name,
            reward_kwargs=dict(reward.reward_kwargs),
        )
        for environment in config.environments
    ]


class SyncMultiTurnRollout:
    """The driver's side: `reset`, `rollout`, `build_update_batch`.

    Args:
        actor_rollout_wg: the policy's worker group.
        config: the run's.
        tokenizer, processor: for those who override this class; the workers have their own.
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one.
        specs: how the agents are built; None: as the config says.
    """

    def __init__(
        self,
        actor_rollout_wg: Any,
        config: PPOConfig,
        tokenizer: Any = None,
        processor: object = None,
        agent_cls: type | None = None,
        specs: Sequence[AgentSpec] | None = None,
    ) -> None:
        self.actor_rollout_wg, self.config, self.tokenizer = actor_rollout_wg, config, tokenizer
        self.resets = 0
        self.episodes: DataProto | None = None
        self.batch: DataProto | None = None
        actor_rollout_wg.start_agents(list(specs) if specs is not None else agent_specs(config, agent_cls))

    def reset(self, gen_batch: DataProto | None = None) -> None:
        """Says what is played next: `gen_batch` (as `describe_episodes` makes it), or `agent.agent_length` x `rollout.n` fresh episodes."""
        self.resets += 1
        self.batch = None
        self.episodes = gen_batch
        if gen_batch is None:
            count, seed = self.config.prompts_per_step, self.config.data.run_seed
            seeded = self.config.trainer.deterministic
            samples = self.config.actor_rollout_ref.rollout.n
            self.episodes = describe_episodes(count, samples, step=self.resets, seed=seed, seeded=seeded)

    def rollout(self) -> list[dict[str, Any]]:
        """Plays them; returns each episode's facts (see `episode_facts`), in order."""
        if self.episodes is None:
            raise ValueError("nothing to play: call reset() first")
        self.batch = self.actor_rollout_wg.run_episodes(self.episodes)
        return [facts for facts in self.batch.non_tensor_batch["episode_facts"] if facts is not None]

    def build_update_batch(self) -> DataProto:
        """What was played, as rows to train on; see `AgentRollout.rows_of`."""
        if self.batch is None:
            raise ValueError("nothing was played: call rollout() first")
        return self.batch

    def close(self) -> None:
        self.actor_rollout_wg.close_agents()


def describe_episodes(
    groups: int,
    samples: int,
    *,
    step: int,
    seed: int,
    first_group: int = 0,
    validate: bool = False,
    seeded: bool = False,
    names: Sequence[str] = ("environment",),
) -> DataProto:
    """`groups` x `samples` episodes to play, without tensors; group g is played by agent g, and its samples face the same task.

    Validation's tasks are the same at every step, and not those of training.
    """
    columns = sample_ids(range(first_group, first_group + groups), samples, step=step, validate=validate)
    numbers = columns["group_index"].tolist()
    seeds = [seed_for(seed, 0, -1 - group) if validate else seed_for(seed, step, group) for group in numbers]
    columns |= {
        "agent_index": columns["group_index"].copy(),
        "env_seed": np.array(seeds, dtype=np.int64),
        "data_source": object_array([names[group % len(names)] for group in numbers]),
    }
    meta = step_info(step=step, seed=seed, seeded=seeded, validate=validate, first_group=first_group)
    agents = {"agent": torch.tensor(columns["agent_index"])}
    return DataProto.from_dict(tensors=agents, non_tensors=columns, meta_info=meta)
