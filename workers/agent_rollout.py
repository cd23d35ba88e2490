"""Episodes as training batches, the worker's side: it plays beside an engine, and makes rows.

    described episodes --batch_of--> TurnLoop --rows_of--> rows

Each description is one row; an episode gives one row, or more where the model's chat template
rewrites history or a new context begins. Invariant: environments, conversations and tokens stay
where the engine is; who plays is a matter of the specs' kinds (kinds.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from data.array_ops import object_array
from data.protocol import DataProto
from data.turn_tokens import Tools
from training.config import PPOConfig
from workers.agent_pools import open_pools
from workers.ranks.process_groups import from_leader, is_leader
from workers.rollout.base_rollout import BaseRollout
from workers.rollout.branches import branch_columns, open_branches, refuse_questions
from workers.rollout.episode import Episode, Row, TurnLimits
from workers.rollout.episode_facts import episode_facts
from workers.rollout.failure_policy import apply_failure_policy
from workers.rollout.history import open_history
from workers.rollout.keepers import open_keepers
from workers.rollout.kinds import EpisodeSpec, kind_of, players
from workers.rollout.questions import open_questions
from workers.rollout.turn_loop import Batch, TurnLoop
from workers.turn_reading import turn_tokens, with_parser


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
        specs: who plays, of each kind of episodes.
        group: the tensor-parallel group, whose leader (the first rank) has the environment pool;
            None for one rank.
    """

    def __init__(
        self,
        config: PPOConfig,
        engine: BaseRollout,
        tokenizer: Any,
        specs: Sequence[EpisodeSpec],
        group: dist.ProcessGroup | None,
    ) -> None:
        self.config = config
        self.engine = engine
        self.group = group
        self.tokens = turn_tokens(config, tokenizer, engine.eos_token_ids, specs)
        specs = with_parser(specs, self.tokens)
        self.specs = list(specs)
        self.keepers = open_keepers(config, self.tokens)
        self.history = open_history(config, self.tokens)
        self.questions = open_questions(config, self.tokens)
        self.branches = open_branches(config, specs, group)
        refuse_questions(self.branches, self.questions)
        self.pool: Any = None
        if is_leader(group):
            self.pool = open_pools(config, specs, engine.max_model_len)
        schemas = self.pool.tool_schemas if self.pool is not None else None
        self.tools: Sequence[Tools] = from_leader(schemas, group)
        own_players = players(specs)
        home = config.environment_home
        # Threads cost little to have.
        is_bounded = home.isolation != "thread" or bool(own_players)
        self.loop = TurnLoop(
            engine,
            tokens=self.tokens,
            environments=self.pool,
            tools=self.tools,
            programs=own_players,
            history=self.history,
            questions=self.questions,
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
        limits = [self.limits(spec) for spec in self.specs]
        if self.branches is None or not is_sampled_to_train(described):
            return Batch(episodes, sampler, limits)
        self.branches.prepare(described)
        return Batch(episodes, sampler, limits, self.branches)

    def limits(self, spec: EpisodeSpec) -> TurnLimits:
        """Returns what ends turns and episodes of this spec's agents."""
        agent = self.config.agent
        return TurnLimits(
            prompt_length=self.config.data.max_prompt_length,
            response_length=self.engine.response_length,
            max_model_len=self.engine.max_model_len,
            max_turn=spec.max_turn or agent.max_turn,
            max_turn_tokens=spec.max_turn_tokens or agent.max_turn_tokens,
            max_refills=agent.max_refills if agent.on_failure == "refill" else 0,
            max_episode_tokens=agent.max_episode_tokens,
            reserved=0 if self.history is None else self.history.reserved,
        )

    def rows_of(self, described: DataProto, episodes: Sequence[Episode]) -> DataProto:
        """Makes a batch of the episodes' rows, in order, once the failure policy was applied.

        Returns:
            What `build_batch` gives, `environment_rewards` (B, R), tensors of features
            (workers/rollout/keepers.py), the description's columns, `anchors`, `ending`,
            `episode_row` (number of the row in its episode) and `episode_facts` (a dict in each
            episode's first row, None in others); where several agents may speak in an episode,
            those of `speaker_columns`; where environments may ask the policy, `row_aside`.
        """
        facts = self._apply_failure_policy(episodes)
        training_rows = list_training_rows(episodes)
        rows = [each.row for each in training_rows]
        batch = self.engine.build_batch(rows, self.config.data.max_prompt_length)
        kept = self.keepers.columns(
            len(rows), self.engine.response_length, taken=set(batch.batch.keys())
        )
        for name, column in kept.items():
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
        if self.branches is not None and is_sampled_to_train(described):
            columns |= branch_columns(self.branches, episodes, descriptions)
        names_speakers = any(kind_of(spec).names_speakers for spec in self.specs)
        if names_speakers or self.questions is not None:
            columns |= speaker_columns(training_rows, columns["data_source"])
        if self.questions is not None:
            columns["row_aside"] = np.array([row.aside for row in rows], dtype=bool)
        return replace(batch, non_tensor_batch=columns, meta_info=dict(described.meta_info))

    def _apply_failure_policy(self, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
        """Applies the failure policy to each episode; returns their facts, keepers' among them."""
        self.keepers.begin(episodes)
        all_facts = []
        for episode in episodes:
            self.keepers.before_policy(episode)
            episode.leave_untrained_out()
            apply_failure_policy(episode, self.config.agent)
            for branch in episode.branches:
                apply_failure_policy(branch, self.config.agent)
            facts = episode_facts(episode)
            all_facts.append(facts | self.keepers.after_policy(episode, facts))
        return all_facts

    def close(self) -> None:
        """Shuts the environment pool down."""
        if self.pool is not None:
            self.pool.shutdown()


def is_sampled_to_train(described: DataProto) -> bool:
    """Checks whether a trainer samples episodes to train on; a replay, a chat and others do not."""
    info = described.meta_info
    return bool(info.get("trains")) and bool(info.get("do_sample", True))


def list_training_rows(episodes: Sequence[Episode]) -> list[TrainingRow]:
    """Lists the rows of all episodes, in order."""
    rows = []
    for description, episode in enumerate(episodes):
        for number, row in enumerate(episode.rows):
            rows.append(TrainingRow(description, number, episode, row))
    return rows


def speaker_columns(rows: Sequence[TrainingRow], sources: np.ndarray) -> dict[str, np.ndarray]:
    """Makes the columns that tell apart the agents of an episode, where who plays names them.

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
