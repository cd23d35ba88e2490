"""Training on groups of episodes as soon as they have ended, while other groups still play.

`GroupStreamingEngines` stands in the place of the engines and hands on the groups that end;
`GroupStreamingPhases` stands in the place of a step's phases: it goes through them with those
groups, up to their gradient, and makes the step's one update in the end. Invariant: every group of
a batch is trained on exactly once, before the batch is given back; batches of validation pass
through untouched.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from custom.agent import AgentSpec
from data.array_ops import object_array
from data.protocol import DataProto
from training.async_rollout.dedicated_engines import SLICE_S
from training.config import PPOConfig
from training.reward import RewardFunction
from training.run.abort_policy import PartsOfBatch, UnscoredWatch
from training.run.worker_group_protocol import Metrics, PlayingGroup
from training.step_phases import StepPhases
from training.worker_groups import WorkerGroups

# The rows that have ended, by rank.
EndedByRank = list[list[DataProto]]


def streams_groups(config: PPOConfig) -> bool:
    """Checks whether a run trains on groups as they end; a deterministic one waits for them all."""
    return config.trainer.train_finished_groups and not config.trainer.deterministic


def stream_groups(
    config: PPOConfig, groups: WorkerGroups, reward_fn: RewardFunction
) -> tuple[GroupStreamingPhases, GroupStreamingEngines]:
    """Makes the phases and the engines of a run that trains on groups as they end."""
    phases = GroupStreamingPhases(config, groups, reward_fn)
    engines = GroupStreamingEngines(
        groups.engines,
        dedicated=config.trainer.rollout_n_gpus > 0,
        train_on=phases.train_on,
    )
    return phases, engines


class GroupStreamingEngines:
    """Plays batches, and has each group of episodes trained on once it has ended.

    On ranks that train too, training goes on where the engine has nothing to sample; dedicated
    engines play on meanwhile.

    Args:
        engines: what plays.
        dedicated: whether they have ranks of their own.
        train_on: trains on groups that have ended.
    """

    def __init__(
        self, engines: PlayingGroup, *, dedicated: bool, train_on: Callable[[DataProto], None]
    ) -> None:
        self.engines = engines
        self.dedicated = dedicated
        self.train_on = train_on
        self._player = ThreadPoolExecutor(1, thread_name_prefix="play")

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Answers prompts, and has those that are not of validation trained on."""
        if prompts.meta_info["validate"]:
            return self.engines.generate_sequences(prompts)
        return self._play_and_train(prompts)

    def run_episodes(self, described: DataProto) -> DataProto:
        """Plays episodes, and has those that are not of validation trained on."""
        if described.meta_info["validate"]:
            return self.engines.run_episodes(described)
        return self._play_and_train(described)

    def _play_and_train(self, described: DataProto) -> DataProto:
        """Plays until every group has ended; returns all rows, in the order of the description."""
        meta_info = described.meta_info | {"by_group": True}
        self.engines.begin_batch(replace(described, meta_info=meta_info))
        episodes_left = Counter(described.non_tensor_batch["uid"].tolist())
        uids = list(episodes_left)
        rows_of_group: dict[str, list[DataProto]] = defaultdict(list)
        wait_for_ended = self._play_on()
        while episodes_left:
            for part in _flat(wait_for_ended()):
                uid = part.meta_info.pop("uid")
                episodes_left[uid] -= part.meta_info.pop("episodes")
                rows_of_group[uid].append(part)
            ended = [uid for uid, episodes in episodes_left.items() if episodes == 0]
            for uid in ended:
                del episodes_left[uid]
            if episodes_left:
                wait_for_ended = self._play_on()
            if ended:
                self.train_on(_rows_of(ended, rows_of_group))
        return _rows_of(uids, rows_of_group)

    def _play_on(self) -> Callable[[], EndedByRank]:
        """Plays a slice; calling the result waits for what has ended.

        Dedicated engines play beside what follows, others when the result is called.
        """
        ranks = self.engines.world_size
        seconds = SLICE_S if ranks > 1 else math.inf
        play = partial(self.engines.play, [seconds] * ranks, [not self.dedicated] * ranks)
        if self.dedicated:
            return self._player.submit(play).result
        return play

    def start_agents(self, specs: list[AgentSpec]) -> None:
        """Opens an environment pool beside each engine."""
        self.engines.start_agents(specs)

    def close_agents(self) -> None:
        """Closes the environment pools."""
        self.engines.close_agents()

    def sync_weights(self, version: int) -> Metrics:
        """Brings the policy's weights to the engines; returns the canaries' metrics."""
        return self.engines.sync_weights(version)

    def sleep_rollout(self) -> None:
        """Gives the engines' memory to those that train on the same ranks."""
        self.engines.sleep_rollout()


def _flat(ended: EndedByRank) -> list[DataProto]:
    """Lists what has ended on any rank."""
    return [part for of_rank in ended for part in of_rank]


def _rows_of(uids: Iterable[str], rows_of_group: dict[str, list[DataProto]]) -> DataProto:
    """Joins the rows of these groups, in this order."""
    return DataProto.concat([part for uid in uids for part in rows_of_group[uid]])


class GroupStreamingPhases(StepPhases):
    """Goes through a step's phases group by group; what `train_step` then calls finds them done.

    That needs an estimator and a loss which look at no more than a group, and a single update a
    step; `training/config` refuses all else.
    """

    def __init__(self, config: PPOConfig, groups: WorkerGroups, reward_fn: RewardFunction) -> None:
        super().__init__(config, groups, reward_fn)
        # The parts of the step's batch whose gradient is there, in the order in which they ended.
        self.trained_parts: list[DataProto] = []
        self.scored_parts = PartsOfBatch(UnscoredWatch(config.agent.max_failure_rate))
        self.unscored = self.scored_parts

    def train_on(self, ended: DataProto) -> None:
        """Goes through the phases with groups that have ended, and adds up their gradient."""
        batch = super().arrange(ended)
        wait_for_reward = self.start_reward(batch)
        if super().needs_old_log_probs() or super().weighs_several_rows(batch):
            batch, _ = self.add_old_log_probs(batch)
        if super().needs_reference():
            batch = batch.union(self.groups.reference.compute_ref_log_prob(batch))
        scores, infos = wait_for_reward()
        batch = self.add_rewards(batch, scores, infos)
        self.apply_kl_penalty(batch)
        batch = super().add_advantages(batch)
        self.groups.policy.add_groups(batch)
        # Only those parts have it in which an episode has several rows.
        batch.batch.pop("episode_share", None)
        self.trained_parts.append(batch)

    def arrange(self, batch: DataProto) -> DataProto:
        """Returns the rows that were trained on, in the order in which their groups ended."""
        self.scored_parts.end_batch()
        return DataProto.concat(_with_same_columns(self.trained_parts))

    def needs_old_log_probs(self) -> bool:
        """Returns False: the rows have what is read of them."""
        return False

    def weighs_several_rows(self, batch: DataProto) -> bool:
        """Returns False: the rows have what is read of them."""
        return False

    def needs_reference(self) -> bool:
        """Returns False: the rows have what is read of them."""
        return False

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Returns the batch, whose rows have them."""
        return batch

    def update_actor(self, batch: DataProto) -> Metrics:
        """Makes the update of the gradients that `train_on` added up; returns metrics."""
        parts = len(self.trained_parts)
        self.trained_parts.clear()
        metrics = self.groups.policy.finish_update()
        return {"training/parts_of_update": float(parts), **metrics}


def _with_same_columns(parts: Sequence[DataProto]) -> list[DataProto]:
    """Fills in None where a part lacks a column of another.

    A reward function may give further values for some groups alone.
    """
    names = {name for part in parts for name in part.non_tensor_batch}
    filled = []
    for part in parts:
        missing = names - part.non_tensor_batch.keys()
        columns = {name: object_array([None] * len(part)) for name in missing}
        filled.append(replace(part, non_tensor_batch=part.non_tensor_batch | columns))
    return filled
