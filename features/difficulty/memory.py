"""Remembers what came of each task, and sorts tasks into pools by it.

A visit is a group that played the task. Of its numbers S (solved episodes), E (episodes) and
sigma (standard deviation of the group's rewards) the task keeps sums in which every earlier visit
counts `decay` times as much as the one behind it:

    S <- decay S + s      E <- decay E + e      solve rate = S / E      spread alike

Episodes that failed are counted apart, and say nothing of how hard the task is. Invariant: what is
remembered does not depend on the order in which a step's groups are told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from data.learning_sampler import GroupOutcome
from features.difficulty.settings import DifficultySettings

# The pools, by their numbers: not played `min_visits` times yet; solved less often than
# `solve_rate` says, within it, more often; played, and every episode failed.
POOLS = ("new", "hard", "apt", "easy", "failing")
NEW, HARD, APT, EASY, FAILING = range(len(POOLS))
COUNTS = ("groups", "visits", "failed", "tokens", "last_step")
SUMS = ("solved", "episodes", "spread", "spread_weight")


class TaskMemory:
    """Holds what came of so many tasks.

    Args:
        tasks: their number.
        settings: bounds and decay.

    Attributes, each (tasks,):
        groups: that played the task, int64; visits: those of which an episode did not fail.
        failed: episodes that failed.
        tokens: that were sampled.
        last_step: in which it was played last; 0: in none.
        solved, episodes: decayed sums, float64.
        spread, spread_weight: the decayed sum of standard deviations, and of their weights.
    """

    def __init__(self, tasks: int, settings: DifficultySettings) -> None:
        self.settings = settings
        self.groups = np.zeros(tasks, dtype=np.int64)
        self.visits = np.zeros(tasks, dtype=np.int64)
        self.failed = np.zeros(tasks, dtype=np.int64)
        self.tokens = np.zeros(tasks, dtype=np.int64)
        self.last_step = np.zeros(tasks, dtype=np.int64)
        self.solved = np.zeros(tasks)
        self.episodes = np.zeros(tasks)
        self.spread = np.zeros(tasks)
        self.spread_weight = np.zeros(tasks)

    def __len__(self) -> int:
        return len(self.groups)

    def learn(self, outcomes: Iterable[GroupOutcome], step: int) -> None:
        """Adds what came of a step's groups."""
        for outcome in sorted(outcomes, key=_key):
            self._add(outcome, step)

    def _add(self, outcome: GroupOutcome, step: int) -> None:
        """Adds what came of one group."""
        task = outcome.task
        rewards = outcome.rewards
        self.tokens[task] += outcome.tokens
        self.failed[task] += outcome.failed
        if not rewards and not outcome.failed:
            # It was left out as too old, say, and tells nothing.
            return
        self.groups[task] += 1
        self.last_step[task] = step
        if not rewards:
            return
        decay = self.settings.decay
        self.visits[task] += 1
        is_solved = [reward >= self.settings.solved_reward for reward in rewards]
        self.solved[task] = decay * self.solved[task] + sum(is_solved)
        self.episodes[task] = decay * self.episodes[task] + len(rewards)
        if len(rewards) > 1:
            self.spread[task] = decay * self.spread[task] + _deviation(rewards)
            self.spread_weight[task] = decay * self.spread_weight[task] + 1

    def after(self, outcomes: Sequence[GroupOutcome]) -> TaskMemory:
        """Returns the memory as it will be once it has learnt this; this one stays as it is."""
        later = TaskMemory(len(self), self.settings)
        for name in (*COUNTS, *SUMS):
            setattr(later, name, getattr(self, name).copy())
        later.learn(outcomes, step=0)
        return later

    def solve_rates(self) -> np.ndarray:
        """Returns the share of episodes that solved each task, (tasks,); NaN: none was counted."""
        return _ratio(self.solved, self.episodes)

    def spreads(self) -> np.ndarray:
        """Returns the standard deviation in a group of each task, (tasks,); NaN: not known."""
        return _ratio(self.spread, self.spread_weight)

    def pools(self) -> np.ndarray:
        """Returns the number of each task's pool among POOLS, (tasks,) int64."""
        low, high = self.settings.solve_rate
        rates = self.solve_rates()
        pools = np.full(len(self), APT)
        pools[rates < low] = HARD
        pools[rates > high] = EASY
        if self.settings.min_spread is not None:
            pools[self.spreads() >= self.settings.min_spread] = APT
        pools[self.visits == 0] = FAILING
        pools[self.groups < self.settings.min_visits] = NEW
        return pools

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns what a checkpoint keeps."""
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in (*COUNTS, *SUMS)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint's `state_dict` of as many tasks."""
        for name in (*COUNTS, *SUMS):
            getattr(self, name)[:] = state[name].numpy()


def _key(outcome: GroupOutcome) -> tuple[Any, ...]:
    """Orders the groups of a task, however they are told."""
    return (outcome.task, sorted(outcome.rewards), outcome.failed, outcome.tokens)


def _deviation(rewards: Sequence[float]) -> float:
    """Returns the standard deviation of a group's rewards, over all of them."""
    if len(set(rewards)) == 1:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _ratio(sums: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Divides, NaN where the weight is zero."""
    ratio = np.full(len(sums), np.nan)
    return np.divide(sums, weights, out=ratio, where=weights > 0)
