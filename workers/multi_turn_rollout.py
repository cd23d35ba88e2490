"""Episodes of agents as training batches: the worker's side, beside the engine, and the driver's.

    driver   SyncMultiTurnRollout   reset() -> rollout() -> build_update_batch()
                                        | descriptions         ^ rows
    worker   AgentRollout               v batch_of -> TurnLoop -> rows_of

The driver describes episodes (who plays, with which seed) and gets rows back. Each description is
one row; an episode gives one row, or more where the model's chat template rewrites history.
Invariant: environments, conversations and tokens stay where the engine is.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from custom.agent import AgentSpec
from custom.env import Task
from custom.env_suite import EnvironmentSuite
from custom.model_usage import USAGE
from data.array_ops import object_array
from data.protocol import DataProto
from data.seeds import step_info
from data.turn_tokens import Tools, TurnTokens
from features.mcp.mcp_session import McpServer
from features.programs.spec import ProgramSpec
from features.programs.with_verifiers.spec import verifiers_spec
from training.config import PPOConfig
from training.config.loader import ConfigError
from training.config.model_settings import model_settings
from training.config.schema.agent import OWN_PYTHON, PASSED_AS_OBJECT, EnvironmentChoice
from training.config.schema.reward import CustomRewardFunctionConfig
from workers.agent_pools import AgentSpecs, open_mixed_pool, program_players
from workers.agent_pools import open_pool as open_pool
from workers.environments.names import environment_name
from workers.environments.pool import EnvironmentPool
from workers.ranks.process_groups import from_leader, is_leader
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.episode import Episode, Row, TurnLimits
from workers.rollout.episode_descriptions import describe_episodes
from workers.rollout.episode_facts import episode_facts
from workers.rollout.failure_policy import apply_failure_policy
from workers.rollout.keepers import open_keepers
from workers.rollout.turn_loop import Batch, TurnLoop


@dataclass(frozen=True)
class TrainingRow:
    """Holds one row of a batch of episodes, with where it comes from.

    Attributes:
        description: the number of the episode's description.
        number: the row's, within its episode.
    """

    description: int
    number: int
    episode: Episode
    row: Row


class AgentRollout:
    """Plays described episodes beside an engine, and makes rows of them: the worker's side.

    Args:
        config: the run's.
        engine: of this rank; with tensor parallelism one of several ranks that share it.
        tokenizer: the policy's.
        specs: how each environment's agents are built.
        group: the tensor-parallel group, whose leader (the first rank) has the environment pool;
            None for one rank.
    """

    def __init__(
        self,
        config: PPOConfig,
        engine: BaseRollout,
        tokenizer: Any,
        specs: AgentSpecs,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.group = group
        self.specs = list(specs)
        self.tokens = TurnTokens(
            tokenizer,
            template_kwargs=dict(config.data.apply_chat_template_kwargs),
            eos_token_ids=engine.eos_token_ids,
        )
        self.keepers = open_keepers(config, self.tokens)
        self.pool = None
        if is_leader(group):
            self.pool = open_mixed_pool(config, specs, engine.max_model_len)
        schemas = self.pool.tool_schemas if self.pool is not None else None
        self.tools: Sequence[Tools] = from_leader(schemas, group)
        players = program_players(specs)
        home = config.environment_home
        # Threads cost little to have.
        is_bounded = home.isolation != "thread" or bool(players)
        self.loop = TurnLoop(
            engine,
            tokens=self.tokens,
            environments=self.pool,
            tools=self.tools,
            programs=players,
            max_live=home.num_workers if is_bounded else None,
            group=group,
        )

    def run(self, described: DataProto) -> DataProto:
        """Plays the described episodes; see `rows_of` for what comes back."""
        batch = self.batch_of(described)
        self.loop.run(batch)
        return self.rows_of(described, batch.episodes)

    def batch_of(self, described: DataProto) -> Batch:
        """Makes the described episodes, for the loop."""
        columns = described.non_tensor_batch
        episodes = []
        for i in range(len(described)):
            episode = Episode(
                group=int(columns["group_index"][i]),
                sample=int(columns["sample_index"][i]),
                spec=int(columns["agent_index"][i]),
                seed=int(columns["env_seed"][i]),
            )
            if "task" in columns:
                episode.task = columns["task"][i]
            episodes.append(episode)
        self.loop.lockstep = bool(described.meta_info.get("seeded"))
        sampler = self.engine.sampler(described.meta_info)
        return Batch(episodes, sampler, [self.limits(spec) for spec in self.specs])

    def limits(self, spec: AgentSpec | ProgramSpec) -> TurnLimits:
        """Returns what ends turns and episodes of this spec's agents."""
        agent = self.config.agent
        return TurnLimits(
            prompt_length=self.config.data.max_prompt_length,
            response_length=self.engine.response_length,
            max_model_len=self.engine.max_model_len,
            max_turn=spec.max_turn or agent.max_turn,
            max_turn_tokens=spec.max_turn_tokens or agent.max_turn_tokens,
            max_refills=agent.max_refills if agent.on_failure == "refill" else 0,
        )

    def rows_of(self, described: DataProto, episodes: Sequence[Episode]) -> DataProto:
        """Makes a batch of the episodes' rows, in order, once the failure policy was applied.

        Returns:
            What `build_batch` gives, `environment_rewards` (B, R), tensors of features
            (workers/rollout/keepers.py), the description's columns, `anchors`, `ending`,
            `episode_row` (number of the row in its episode) and `episode_facts` (a dict in each
            episode's first row, None in others); where programs play, those of `speaker_columns`.
        """
        facts = self._apply_failure_policy(episodes)
        training_rows = list_training_rows(episodes)
        rows = [each.row for each in training_rows]
        batch = self.engine.build_batch(rows, self.config.data.max_prompt_length)
        for keeper in self.keepers:
            for name, column in keeper.columns(self.engine.response_length).items():
                batch.batch[name] = column
        rewards = reward_matrix(rows, self.engine.response_length)
        batch.batch["environment_rewards"] = torch.from_numpy(rewards)  # (B, R)
        descriptions = np.array(
            [each.description for each in training_rows], dtype=np.int64
        )  # (B,)
        columns = {
            name: values[descriptions] for name, values in described.non_tensor_batch.items()
        }
        columns["anchors"] = object_array([each.episode.anchors for each in training_rows])
        columns["ending"] = object_array([each.episode.ending for each in training_rows])
        columns["episode_row"] = np.array([each.number for each in training_rows], dtype=np.int64)
        columns["episode_facts"] = object_array(
            [facts[each.description] if each.number == 0 else None for each in training_rows]
        )
        if any(isinstance(spec, ProgramSpec) for spec in self.specs):
            columns |= speaker_columns(training_rows, columns["data_source"])
        return replace(batch, non_tensor_batch=columns, meta_info=dict(described.meta_info))

    def _apply_failure_policy(self, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
        """Applies the failure policy to each episode; returns their facts, keepers' among them."""
        for keeper in self.keepers:
            keeper.begin(episodes)
        all_facts = []
        for episode in episodes:
            for keeper in self.keepers:
                keeper.before_policy(episode)
            apply_failure_policy(episode, self.config.agent)
            facts = episode_facts(episode)
            for keeper in self.keepers:
                facts |= keeper.after_policy(episode, facts)
            all_facts.append(facts)
        return all_facts

    def close(self) -> None:
        """Shuts the environment pool down."""
        if self.pool is not None:
            self.pool.shutdown()


def list_training_rows(episodes: Sequence[Episode]) -> list[TrainingRow]:
    """Lists the rows of all episodes, in order."""
    rows = []
    for description, episode in enumerate(episodes):
        for number, row in enumerate(episode.rows):
            rows.append(TrainingRow(description, number, episode, row))
    return rows


def speaker_columns(rows: Sequence[TrainingRow], sources: np.ndarray) -> dict[str, np.ndarray]:
    """Makes the columns that tell apart the agents of an episode, where a program names them.

    Args:
        sources: (B,) what plays, by name.

    Returns:
        `agent_role`: SOURCE/AGENT, or the source where no agent is named; and
        `agent_conversation`: AGENT/NAME, or ""; each (B,).
    """
    roles = []
    conversations = []
    for each, source in zip(rows, sources, strict=True):
        speaker = each.row.speaker
        roles.append(f"{source}/{speaker.agent}" if speaker.agent else str(source))
        conversations.append(f"{speaker.agent}/{speaker.conversation}" if speaker.agent else "")
    return {
        "agent_role": object_array(roles),
        "agent_conversation": object_array(conversations),
    }


def reward_matrix(rows: Sequence[Row], width: int) -> np.ndarray:
    """Returns the rewards of each row at their tokens: (B, width) float32."""
    rewards = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        for position, reward in row.reward_at.items():
            rewards[i, position] = reward
    return rewards


# How agents and their environments are built.


def agent_specs(config: PPOConfig, agent_cls: type | None = None) -> list[AgentSpec | ProgramSpec]:
    """Returns how the config's agents are built, one spec an environment.

    `agent_cls` wins over `agent.cls`. ValueError where there is nothing to act in.
    """
    if agent_cls is not None:
        config = config.acting_in_given
    if not config.environments:
        raise ValueError(
            "there is nothing to act in: set agent.environment or agent.cls, or give agent_cls or "
            "specs"
        )
    agent = config.agent
    reward = config.custom_reward_function
    if config.plays_dataset_rows:
        # It scores rows, not trajectories.
        reward = CustomRewardFunctionConfig()
    specs: list[AgentSpec | ProgramSpec] = []
    for environment in config.environments:
        if environment.is_program:
            specs.append(program_spec(config, environment))
            continue
        spec = AgentSpec(
            _source(environment),
            kwargs=environment.kwargs,
            agent_path=agent.cls.path if agent_cls is None else None,
            agent_name=agent.cls.name or "Agent",
            agent_cls=agent_cls,
            tools=agent.tools,
            mcp_servers=tuple(
                McpServer(name=name, **vars(server)) for name, server in agent.mcp_servers.items()
            ),
            parser=agent.parser,
            include_state=agent.include_state,
            prompt_template=environment.prompt_template,
            max_observation_chars=agent.max_observation_chars,
            reward_path=reward.path,
            reward_name=reward.name,
            reward_kwargs=reward.reward_kwargs,
            max_turn=environment.max_turn,
            max_turn_tokens=environment.max_turn_tokens,
            models=model_settings(config),
        )
        specs.append(spec)
    return specs


def program_spec(config: PPOConfig, choice: EnvironmentChoice) -> ProgramSpec:
    """Returns how a program is started and paid."""
    agent = config.agent
    reward = config.custom_reward_function
    command = choice.command
    if command and command[0] in OWN_PYTHON:
        command = (sys.executable, *command[1:])
    spec = ProgramSpec(
        command=command,
        function=choice.program,
        preload=agent.preload,
        reward=agent.program_reward,
        parser=agent.parser,
        request_timeout_s=agent.request_timeout_s,
        client_sampling=agent.client_sampling,
        memory_gb=config.program_memory_gb,
        reward_path=reward.path,
        reward_name=reward.name,
        reward_kwargs=reward.reward_kwargs,
        max_turn=choice.max_turn,
        max_turn_tokens=choice.max_turn_tokens,
        models=model_settings(config),
    )
    if choice.is_of_verifiers:
        return verifiers_spec(config, choice, spec)
    return spec


def try_reward_functions(config: PPOConfig, specs: AgentSpecs) -> None:
    """Has each spec with a reward function of its own play an episode of one turn, and be paid.

    Raises:
        ConfigError: a function raises, returns no reward, or takes other arguments.
    """
    problems = []
    specs = [spec for spec in specs if isinstance(spec, AgentSpec)]
    with open_pool(config, specs) as pool:
        for index in range(len(specs)):
            problems += reward_problems(pool, specs, index, config.data.run_seed)
    if problems:
        raise ConfigError(problems)


def reward_problems(
    pool: EnvironmentPool, specs: AgentSpecs, index: int, seed: int, task: Task | None = None
) -> list[str]:
    """Says what is wrong with a spec's reward function, if it has one, after an episode of a turn.

    Args:
        task: what the reset is given beside the seed.
    What else fails in the episode shows when it is played.
    """
    spec = specs[index]
    # A program's is tried with it.
    if isinstance(spec, ProgramSpec):
        return []
    if spec.reward_fn is None and spec.reward_path is None:
        return []
    pool.trial(index, index, seed, episodes=1, max_turn=1, task=task)
    reply = pool.wait_for_reply()
    if reply.failure != "reward_fault":
        return []
    name = environment_name(spec.source)
    return [f"{reply.error}; seen before the first step, in an episode of {name}"]


def _source(environment: EnvironmentChoice) -> str | None:
    """Returns what an environment is made from; None where the agent class brings its own."""
    if environment.path is not None:
        return f"{environment.path}:{environment.cls}"
    return None if environment.name == PASSED_AS_OBJECT else environment.name


class SyncMultiTurnRollout:
    """Lets the workers play episodes, and hands their rows to the trainer: the driver's side.

    Args:
        actor_rollout_wg: the policy's worker group.
        cfg: the run's config.
        tokenizer, processor: for those who override this class; the workers have their own.
        agent_cls: an agent class of one's own; None: `agent.cls`, or the built-in one.
        specs: how the agents are built; None: as the config says.

    Attributes:
        wanted: what the trainer described last, which `reset` takes where it is given nothing.
        facts: of sampled episodes, also of those that are filtered out, by (whether it is
            validation, step).
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
        self.actor_rollout_wg = actor_rollout_wg
        self.config = cfg
        self.tokenizer = tokenizer
        self.processor = processor
        self.resets = 0
        self.wanted: DataProto | None = None
        self.facts: dict[tuple[bool, int], list[dict[str, Any]]] = {}
        self.episodes: DataProto | None = None
        self.batch: DataProto | None = None
        if specs is None:
            specs = agent_specs(cfg, agent_cls)
            pays = [spec for spec in specs if isinstance(spec, AgentSpec)]
            if any(spec.reward_fn or spec.reward_path for spec in pays):
                try_reward_functions(cfg, specs)
        names = [environment_name(spec.source) for spec in specs]
        self.suite = EnvironmentSuite(names, [1.0] * len(names))
        actor_rollout_wg.start_agents(specs)

    def reset(self, gen_batch: DataProto | None = None) -> None:
        """Chooses what is played next: `gen_batch`, or what the trainer wants.

        `gen_batch` is as `describe_episodes` makes it. Without a trainer
        `agent.agent_length` x `rollout.n` fresh episodes are played, of each environment in turn.
        """
        self.batch = None
        self.episodes = gen_batch or self.wanted
        if self.episodes is not None:
            return
        self.resets += 1
        info = step_info(
            step=self.resets,
            seed=self.config.data.run_seed,
            seeded=self.config.trainer.deterministic,
        )
        self.episodes = describe_episodes(
            self.config.prompts_per_step,
            self.config.actor_rollout_ref.rollout.n,
            info,
            suite=self.suite,
        )

    def rollout(self) -> list[dict[str, Any]]:
        """Plays what `reset` chose.

        Returns:
            Each episode's facts (see `episode_facts`), in order.
        """
        if self.episodes is None:
            raise ValueError("nothing to play: call reset() first")
        self.batch = self.actor_rollout_wg.run_episodes(self.episodes)
        column = self.batch.non_tensor_batch["episode_facts"]
        facts = [entry for entry in column if entry is not None]
        for episode in facts:
            USAGE.add(episode["models"])
        info = self.episodes.meta_info
        if info.get("do_sample", True):
            key = (bool(info["validate"]), info["global_steps"])
            self.facts.setdefault(key, []).extend(facts)
        return facts

    def take_facts(self, validate: bool = False, step: int | None = None) -> list[dict[str, Any]]:
        """Returns the facts of sampled episodes since the last time.

        They are of training or of validation; with `step` of that step alone.
        """
        facts = []
        for key in list(self.facts):
            of_validation, of_step = key
            if of_validation == validate and step in (None, of_step):
                facts += self.facts.pop(key)
        return facts

    def build_update_batch(self) -> DataProto:
        """Returns what was played, as rows to train on; see `AgentRollout.rows_of`."""
        if self.batch is None:
            raise ValueError("nothing was played: call rollout() first")
        return self.batch

    def close(self) -> None:
        """Closes the workers' environment pools."""
        self.actor_rollout_wg.close_agents()
