"""Episodes of agents as training batches: the worker's side, beside the engine, and the driver's.

The driver describes episodes (who plays, with which seed) and gets rows back. Each description is one row; an episode
gives one row, or more where the model's chat template rewrites history. Invariant: environments, conversations and
tokens stay where the engine is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from custom.agent import AgentSpec
from custom.confine import Limits
from custom.env_suite import EnvironmentSuite
from data.containers import object_array, sample_ids, seed_for, step_info
from data.protocol import DataProto
from data.turn_tokens import Tools, TurnTokens
from training.batch.batching import rows_by_key
from training.config import AgentConfig, PPOConfig
from training.config.settings import GIVEN, EnvironmentChoice
from workers.environments.env_server import StepReply
from workers.environments.pool import EnvironmentPool, environment_name
from workers.ranks.distributed import from_leader, is_leader
from workers.rollout.base import BaseRollout, Batch, TurnLoop
from workers.rollout.episode import FAILURES, Episode, Turn, TurnLimits, digest

AgentSpecs = Sequence[AgentSpec]


class AgentRollout:
    """Is the worker's side: plays described episodes, and makes rows of them.

    Args:
        config: the run's.
        engine: of this rank; with tensor parallelism one of several ranks that share it.
        tokenizer: the policy's.
        specs: how each environment's agents are built.
        group: the tensor-parallel group, whose leader (the first rank) has the environment pool; None for one rank.
    """

    def __init__(
        self,
        config: PPOConfig,
        engine: BaseRollout,
        tokenizer: Any,
        specs: AgentSpecs,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config, self.engine, self.group = config, engine, group
        self.specs = list(specs)
        template = dict(config.data.apply_chat_template_kwargs)
        self.tokens = TurnTokens(
            tokenizer, template_kwargs=template, eos_token_ids=engine.eos_token_ids
        )
        self.pool = open_pool(config, specs) if is_leader(group) else None
        self.tools: Sequence[Tools] = from_leader(self.pool and self.pool.tool_schemas, group)
        home = config.environment_home
        live = home.num_workers if home.isolation != "thread" else None
        given: dict[str, Any] = {
            "tokens": self.tokens,
            "environments": self.pool,
            "tools": self.tools,
        }
        self.loop = TurnLoop(engine, **given, max_live=live, group=group)

    def run(self, described: DataProto) -> DataProto:
        """Plays the described episodes; see `rows_of` for what comes back."""
        batch = self.batch_of(described)
        self.loop.run(batch)
        return self.rows_of(described, batch.episodes)

    def batch_of(self, described: DataProto) -> Batch:
        """Makes the described episodes, for the loop."""
        names = {
            "group": "group_index",
            "sample": "sample_index",
            "spec": "agent_index",
            "seed": "env_seed",
        }
        names |= {"task": "task"} if "task" in described.non_tensor_batch else {}
        rows = zip(
            *(described.non_tensor_batch[name].tolist() for name in names.values()), strict=True
        )
        episodes = [Episode(**dict(zip(names, row, strict=True))) for row in rows]
        self.loop.lockstep = bool(described.meta_info.get("seeded"))
        return Batch(
            episodes,
            self.engine.sampler(described.meta_info),
            [self.limits(spec) for spec in self.specs],
        )

    def limits(self, spec: AgentSpec) -> TurnLimits:
        """Returns what ends turns and episodes of this spec's agents."""
        agent, data = self.config.agent, self.config.data
        return TurnLimits(
            prompt_length=data.max_prompt_length,
            response_length=self.engine.response_length,
            max_model_len=self.engine.max_model_len,
            max_turn=spec.max_turn or agent.max_turn,
            max_turn_tokens=spec.max_turn_tokens or agent.max_turn_tokens,
            max_refills=agent.max_refills if agent.on_failure == "refill" else 0,
        )

    def rows_of(self, described: DataProto, episodes: Sequence[Episode]) -> DataProto:
        """Makes a batch of the episodes' rows, in order.

        Returns:
            What `build_batch` gives, `environment_rewards` (B, R), the description's columns, `ending`, `episode_row`
            (number of the row in its episode) and `episode_facts` (a dict in each episode's first row, None in others).
        """
        facts = []
        for episode in episodes:
            record = (
                {}
                if self.config.agent.episodes_dir is None
                else {"record": episode_record(episode)}
            )
            settle(episode, self.config.agent)
            facts.append(episode_facts(episode) | record)
        owners = [
            (number, k) for number, episode in enumerate(episodes) for k in range(len(episode.rows))
        ]
        rows = [episodes[number].rows[k] for number, k in owners]
        batch = self.engine.build_batch(rows, self.config.data.max_prompt_length)
        rewards = np.zeros((len(rows), self.engine.response_length), np.float32)
        for number, row in enumerate(rows):
            rewards[number, [*row.reward_at]] = [*row.reward_at.values()]
        batch.batch["environment_rewards"] = torch.from_numpy(rewards)  # (B, R)
        index = np.array([number for number, _ in owners], dtype=np.int64)
        columns = {name: values[index] for name, values in described.non_tensor_batch.items()}
        columns["anchors"] = object_array(
            [[turn.anchor for turn in episodes[number].turns] for number, _ in owners]
        )
        columns["ending"] = object_array([episodes[number].ending for number, _ in owners])
        columns["episode_row"] = np.array([k for _, k in owners], dtype=np.int64)
        columns["episode_facts"] = object_array(
            [facts[number] if k == 0 else None for number, k in owners]
        )
        return replace(batch, non_tensor_batch=columns, meta_info=dict(described.meta_info))

    def close(self) -> None:
        """Shuts the environment pool down."""
        if self.pool is not None:
            self.pool.shutdown()


def by_group(described: DataProto) -> Iterator[DataProto]:
    """Cuts described prompts or episodes by `uid`; meta_info then has that and how many `episodes` they are."""
    for uid, rows in rows_by_key(described.non_tensor_batch["uid"].tolist()).items():
        part = described.select_idxs(rows)
        yield replace(part, meta_info=described.meta_info | {"uid": uid, "episodes": len(rows)})


def open_pool(config: PPOConfig, specs: AgentSpecs) -> EnvironmentPool:
    """Opens the environment pool that the config asks for."""
    home = config.environment_home
    seconds = {name: config.agent[name] for name in ("step_timeout_s", "episode_timeout_s")}
    limits = Limits(network=home.network, memory_gb=home.memory_gb)
    return EnvironmentPool(
        specs, isolation=home.isolation, num_workers=home.num_workers, limits=limits, **seconds
    )


def settle(episode: Episode, agent: AgentConfig) -> None:
    """Gives an ended episode the rewards and masks that it is trained on with.

    A failed episode's rows lose their rewards; where their tokens are masked too, nothing of them is trained on. So it
    is with what the engine failed, which is never the policy's doing. `on_failure=mask` masks every failed episode,
    `refill` one that crashed to the last attempt: a timeout may well be the policy's doing, and to leave it out would
    reward it for that.
    """
    if episode.ending == "overflow" and agent.overflow_reward:
        episode.add_reward(agent.overflow_reward)
    if episode.ending in FAILURES:
        crashed = agent.on_failure == "refill" and episode.ending == "env_crash"
        masked = agent.on_failure == "mask" or episode.ending == "engine_error" or crashed
        for row in episode.rows:
            row.reward_at, row.spans = {}, [] if masked else row.spans


def episode_facts(episode: Episode) -> dict[str, Any]:
    """Returns what a step needs to know of a settled episode.

    `begins` hashes its first messages, seconds are wall time, `observation` and `done` are of the last reply.
    """
    begins, last = episode.initial_messages, episode.turns[-1].reply if episode.turns else None
    return {
        "observation": "\n".join(message["content"] for message in last.messages) if last else "",
        "done": last is not None and last.done,
        "ending": episode.ending,
        "error": episode.first_error,
        "environment": episode.spec,
        "group": episode.group,
        "begins": digest(begins) if begins else "",
        "turns": len(episode.turns),
        "attempts": episode.attempt + 1,
        "cut_turns": sum(turn.finish_reason == "length" for turn in episode.turns),
        "env_seconds": episode.env_seconds,
        "seconds": episode.seconds,
        "tool_calls": [
            call for turn in episode.turns if turn.reply for call in turn.reply.tool_calls
        ],
        # Of a name that several turns give the last counts.
        "info": {
            name: value
            for turn in episode.turns
            if turn.reply
            for name, value in turn.reply.info.items()
        },
        "reward": float(sum(sum(row.reward_at.values()) for row in episode.rows)),
        "masked": not any(row.spans for row in episode.rows),
    }


def episode_record(episode: Episode) -> dict[str, Any]:
    """Returns all of an episode, as JSON holds it: what was said, the ids, and what came of it."""
    return {
        "attempt": episode.attempt,
        "task": episode.task,
        "initial_messages": episode.initial_messages,
        "turns": [turn_record(turn) for turn in episode.turns],
        "rows": [row.record() for row in episode.rows],
    }


def turn_record(turn: Turn) -> dict[str, Any]:
    """Returns a turn, as JSON holds it; `done` is null where the environment gave no reply."""
    reply = turn.reply or StepReply()
    return {
        "text": turn.text,
        "reward": reply.reward or 0.0,
        "finish_reason": turn.finish_reason,
        "observation": reply.messages,
        "done": None if turn.reply is None else reply.done,
        "env_seconds": reply.seconds,
        "tool_calls": reply.tool_calls,
        "info": reply.info,
    }


def agent_specs(config: PPOConfig, agent_cls: type | None = None) -> list[AgentSpec]:
    """Says how the config's agents are built, one spec an environment; `agent_cls` wins over `agent.cls`."""
    agent, reward = config.agent, config.custom_reward_function
    shared = {
        name: agent[name] for name in ("tools", "parser", "include_state", "max_observation_chars")
    }
    shared |= {
        "agent_path": None if agent_cls else agent.cls.path,
        "agent_name": agent.cls.name or "Agent",
    }
    shared |= {
        "reward_path": reward.path,
        "reward_name": reward.name,
        "reward_kwargs": reward.reward_kwargs,
    }
    own = ("kwargs", "prompt_template", "max_turn", "max_turn_tokens")
    return [
        AgentSpec(
            _source(each), agent_cls=agent_cls, **shared, **{name: each[name] for name in own}
        )
        for each in config.environments
    ]


def _source(environment: EnvironmentChoice) -> str | None:
    """Returns what an environment is made from; None where the agent class brings its own."""
    if environment.path is not None:
        return f"{environment.path}:{environment.cls}"
    return None if environment.name == GIVEN else environment.name


class SyncMultiTurnRollout:
    """Is the driver's side: `reset`, `rollout`, `build_update_batch`.

    Args:
        actor_rollout_wg: the policy's worker group.
        cfg: the run's config.
        tokenizer, processor: for those who override this class; the workers have their own.
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one.
        specs: how the agents are built; None: as the config says.
    """

    def __init__(
        self,
        actor_rollout_wg: Any,
        cfg: PPOConfig,
        tokenizer: Any = None,
        processor: object = None,
        agent_cls: type | None = None,
        specs: AgentSpecs | None = None,
    ) -> None:
        self.actor_rollout_wg, self.config, self.tokenizer = actor_rollout_wg, cfg, tokenizer
        self.processor, self.resets = processor, 0
        # What the trainer described last, which `reset` takes where it is given nothing.
        self.wanted: DataProto | None = None
        # Facts of sampled episodes, also of those that are filtered out: by whether it is validation, and step.
        self.facts: dict[tuple[bool, int], list[dict[str, Any]]] = {}
        self.episodes: DataProto | None = None
        self.batch: DataProto | None = None
        specs = list(specs) if specs is not None else agent_specs(cfg, agent_cls)
        names = [environment_name(spec.source) for spec in specs]
        self.suite = EnvironmentSuite(names, [1.0] * len(names))
        actor_rollout_wg.start_agents(specs)

    def reset(self, gen_batch: DataProto | None = None) -> None:
        """Says what is played next: `gen_batch` (as `describe_episodes` makes it), or what the trainer wants.

        Without a trainer those are `agent.agent_length` x `rollout.n` fresh episodes, of each environment in turn.
        """
        self.batch, self.episodes = None, gen_batch or self.wanted
        if self.episodes is None:
            self.resets, config = self.resets + 1, self.config
            counts = config.prompts_per_step, config.actor_rollout_ref.rollout.n
            info = step_info(
                step=self.resets, seed=config.data.run_seed, seeded=config.trainer.deterministic
            )
            self.episodes = describe_episodes(*counts, info, suite=self.suite)

    def rollout(self) -> list[dict[str, Any]]:
        """Plays what `reset` said; returns each episode's facts (see `episode_facts`), in order."""
        if self.episodes is None:
            raise ValueError("nothing to play: call reset() first")
        self.batch = self.actor_rollout_wg.run_episodes(self.episodes)
        facts = [
            facts for facts in self.batch.non_tensor_batch["episode_facts"] if facts is not None
        ]
        if self.episodes.meta_info.get("do_sample", True):
            info = self.episodes.meta_info
            self.facts.setdefault((bool(info["validate"]), info["global_steps"]), []).extend(facts)
        return facts

    def take_facts(self, validate: bool = False, step: int | None = None) -> list[dict[str, Any]]:
        """Returns the facts of sampled episodes since the last time, of training or validation, or a step of it."""
        keys = [key for key in list(self.facts) if key[0] == validate and step in (None, key[1])]
        return [fact for key in keys for fact in self.facts.pop(key)]

    def build_update_batch(self) -> DataProto:
        """Returns what was played, as rows to train on; see `AgentRollout.rows_of`."""
        if self.batch is None:
            raise ValueError("nothing was played: call rollout() first")
        return self.batch

    def close(self) -> None:
        """Closes the workers' environment pools."""
        self.actor_rollout_wg.close_agents()


def describe_episodes(
    groups: int,
    samples: int,
    info: dict[str, Any],
    *,
    first_group: int = 0,
    suite: EnvironmentSuite | None = None,
    tasks: Sequence[dict[str, Any]] = (),
) -> DataProto:
    """Describes `groups` x `samples` episodes to play, a row each; `info` is what `step_info` makes.

    `tasks` has what `reset` is given beside the seed, for each group; an empty one is no task.
    Who plays group g says the suite (None: one environment), and its samples face the same task. Validation's tasks are
    the same at every step, and not those of training; there each environment has its turn.
    """
    suite = suite or EnvironmentSuite(["environment"], [1.0])
    played = range(first_group, first_group + groups)
    step, seed, validate = info["global_steps"], info["seed"], info["validate"]
    columns = sample_ids(played, samples, step=step, validate=validate)
    seeds = [
        seed_for(seed, 0, -1 - group) if validate else seed_for(seed, step, group)
        for group in played
    ]
    chosen = (
        suite.in_turn(played)
        if validate
        else suite.choose(played, seed_for(seed, step, first_group))
    )
    agents = np.repeat(np.array(chosen, dtype=np.int64), samples)
    columns |= {
        "agent_index": agents,
        "env_seed": np.repeat(np.array(seeds, dtype=np.int64), samples),
    }
    columns |= (
        {"task": object_array([task for task in tasks for _ in range(samples)])}
        if any(tasks)
        else {}
    )
    columns["data_source"] = object_array([suite.names[index] for index in agents])
    return DataProto.from_dict(
        tensors={"agent": torch.tensor(agents)}, non_tensors=columns, meta_info=info
    )
