"""Finds rewards that do not vary, and advantages that are all zero.

The state is of the whole run and goes with its checkpoints.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.run.alarms.catalogue import Finding
from training.run.alarms.history import Metrics

# Rewards of a source that are remembered, and the chance below which their constancy is no
# accident.
PAST_REWARDS = 256
CHANCE = 1e-4
FEWEST_EPISODES = 8
# Advantages below it are zero.
SMALLEST_ADVANTAGE = 1e-8


@dataclass
class SourceRewards:
    """Remembers the rewards of one data source or environment.

    Attributes:
        best: the highest so far.
        past: the last rewards of steps in which they varied.
        constant_episodes: for how many episodes they have not varied now.
    """

    best: float = float("-inf")
    past: list[float] = field(default_factory=list)
    constant_episodes: int = 0

    def add(self, rewards: list[float]) -> None:
        """Adds a step's rewards."""
        self.best = max(self.best, *rewards)
        if max(rewards) != min(rewards):
            self.past = (self.past + rewards)[-PAST_REWARDS:]
            self.constant_episodes = 0
        elif self.past and rewards[0] == self.best:
            # All of a task's best rewards are as they should be.
            self.constant_episodes = 0
        else:
            self.constant_episodes += len(rewards)

    def is_suspicious(self, reward: float) -> bool:
        """Judges whether a constant reward has stood for longer than chance would have it.

        Where few episodes earn anything, several steps may well go without.
        """
        share_of_others = 1.0
        if self.past:
            others = [past for past in self.past if past != reward]
            share_of_others = len(others) / len(self.past)
        return (
            self.constant_episodes >= 2 * FEWEST_EPISODES
            and self.constant_episodes * share_of_others > -math.log(CHANCE)
        )


class RewardRules:
    """Watches the rewards of each source.

    Args:
        source_key: the column that names a row's source.
    """

    def __init__(self, source_key: str) -> None:
        self.source_key = source_key
        self.sources: dict[str, SourceRewards] = defaultdict(SourceRewards)
        # Whether every episode of the last step had its source's best reward.
        self.solved = False

    def check(self, batch: DataProto, episodes: EpisodeRows, metrics: Metrics) -> Iterator[Finding]:
        """Finds sources of constant rewards, but for those at their best; then zero advantages."""
        constant = []
        self.solved = True
        num_episodes = 0
        for name, rewards in self._rewards_by_source(batch, episodes).items():
            source = self.sources[name]
            source.add(rewards)
            num_episodes += len(rewards)
            if source.is_suspicious(rewards[0]):
                constant.append(
                    f"all {source.constant_episodes} episodes of {name} got {rewards[0]:g}"
                )
            if not max(rewards) == min(rewards) == source.best:
                self.solved = False
        if constant:
            yield Finding("reward_constant", "; ".join(constant))
        lowest = metrics.get("critic/advantages/min", 1.0)
        highest = metrics.get("critic/advantages/max", 1.0)
        all_zero = max(abs(lowest), abs(highest)) < SMALLEST_ADVANTAGE
        if all_zero and not constant and not self.solved and num_episodes >= FEWEST_EPISODES:
            yield Finding("advantages_zero", "every advantage of the batch is 0")

    def _rewards_by_source(self, batch: DataProto, episodes: EpisodeRows) -> dict[str, list[float]]:
        """Sums each episode's scores, without dummies and masked episodes."""
        is_real = episodes.real.tolist()
        scores = batch.batch["token_level_scores"].sum(1).tolist()
        is_live = batch.batch["response_mask"].any(1).tolist()
        names = batch.non_tensor_batch.get(self.source_key, ["all"] * len(batch))
        rewards: dict[str, list[float]] = defaultdict(list)
        for rows in episodes.rows:
            if is_real[rows[0]] and any(is_live[row] for row in rows):
                rewards[str(names[rows[0]])].append(sum(scores[row] for row in rows))
        return rewards

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: source -> [best, past, constant_episodes]."""
        state = {}
        for name, source in self.sources.items():
            state[name] = [source.best, source.past, source.constant_episodes]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        for name, (best, past, constant_episodes) in state.items():
            self.sources[name] = SourceRewards(
                best=best, past=list(past), constant_episodes=constant_episodes
            )
