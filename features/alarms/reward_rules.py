"""Finds rewards that were not given, that do not vary, and advantages that are all zero.

The state is of the whole run and goes with its checkpoints.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from data.protocol import DataProto
from features.alarms.batch_rules import place_of, played_episodes
from features.alarms.catalogue import Finding
from features.alarms.history import Metrics
from features.alarms.spread_rules import GroupSpread, groups_without_spread
from training.batch.dynamic_sampling import REWARD_INFO
from training.batch.episode_rows import EpisodeRows
from training.config import AlgorithmConfig
from training.core_algos import kl_penalty

# Rewards of a source that are remembered, and the chance below which their constancy is no
# accident.
PAST_REWARDS = 256
CHANCE = 1e-4
FEWEST_EPISODES = 8
# Scores that must have agreed before one that does not is a fault.
FEWEST_PAIRS = 4
# Advantages below it are zero.
SMALLEST_ADVANTAGE = 1e-8


def unpaid_rewards(
    batch: DataProto, episodes: EpisodeRows, *, are_scores: bool, overflow_reward: float
) -> Iterator[Finding]:
    """Finds episodes that are trained on with other rewards than the environment gave.

    Args:
        are_scores: the environment's rewards are the scores, and nothing else is.
        overflow_reward: what an episode that overflowed gets on top.
    """
    fields = batch.batch
    name = "token_level_scores" if are_scores else "environment_rewards"
    if name not in fields:
        return
    sums = fields[name].sum(1, dtype=torch.float64).tolist()
    for rows, facts in played_episodes(batch, episodes):
        held = sum(sums[row] for row in rows)
        paid = facts["paid"]
        if facts["ending"] == "overflow":
            paid += overflow_reward
        if not math.isclose(held, paid, rel_tol=1e-4, abs_tol=1e-4):
            yield Finding(
                "reward_differs",
                f"episode {batch.non_tensor_batch['episode_id'][rows[0]]} was paid {paid:.4g}, and "
                f"is trained on with {held:.4g}",
                place_of(batch, rows[0]),
            )
            return


def other_rewards(
    algorithm: AlgorithmConfig, batch: DataProto, metrics: Metrics
) -> Iterator[Finding]:
    """Finds rewards that are not the scores, less the KL where it is to be taken off."""
    fields = batch.batch
    taken_off = fields["token_level_scores"] - fields["token_level_rewards"]
    mask = fields["response_mask"]
    expected = 0.0
    size = float(taken_off.abs().sum())
    if algorithm.use_kl_in_reward:
        kl = kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], algorithm.kl_penalty)
        kl = metrics["actor/reward_kl_penalty_coeff"] * kl * mask
        expected = float(kl.sum())
        size = float(kl.abs().sum())
    found = float(taken_off.sum())
    if abs(found - expected) > 1e-3 * size + 1e-6:
        yield Finding(
            "reward_differs",
            f"scores less rewards are {found:.4g} in all; the KL makes them {expected:.4g}",
        )


class ScoreRules:
    """Watches what a reward function gives: it stays, and equal answers get the same.

    Where a function once gave equal answers different scores, as a judge may, or said another score
    than it gave, that is not watched.

    Attributes:
        given: (B,) float64, what the rows of the step were given; None: not known.
    """

    def __init__(self) -> None:
        self.given: Tensor | None = None
        # For how many pairs of equal answers, and how many scores, it has held so far.
        self.equal_pairs = 0
        self.equal_infos = 0
        self.varies = False
        self.is_another_score = False

    def check(self, batch: DataProto, episodes: EpisodeRows) -> Iterator[Finding]:
        """Looks at a step's scores; of environments only at whether they stay."""
        yield from self._check_given(batch)
        if "environment_rewards" in batch.batch:
            return
        scores = batch.batch["token_level_scores"].sum(1).tolist()
        rows = [row for row, is_real in enumerate(episodes.real.tolist()) if is_real]
        yield from self._check_pairs(batch, rows, scores)
        yield from self._check_infos(batch, rows, scores)

    def _check_given(self, batch: DataProto) -> Iterator[Finding]:
        """Compares the scores that are trained on with those that were given."""
        given = self.given
        self.given = None
        scores = batch.batch["token_level_scores"].sum(1, dtype=torch.float64)
        if given is None or given.shape != scores.shape:
            return
        is_live = batch.batch["response_mask"].any(1)
        differing = ((given - scores).abs() > 1e-4 * (1 + given.abs())) & is_live
        if differing.any():
            row = int(differing.nonzero()[0])
            yield Finding(
                "reward_differs",
                f"{int(differing.sum())} of {len(given)} rows are trained on with another score "
                f"than they were given, as row {row} with {scores[row]:.4g} for {given[row]:.4g}",
                place_of(batch, row),
            )

    def _check_pairs(
        self, batch: DataProto, rows: list[int], scores: list[float]
    ) -> Iterator[Finding]:
        """Compares the scores of equal answers within a group."""
        if self.varies:
            return
        ids = batch.batch["responses"].numpy()
        mask = batch.batch["response_mask"].numpy().astype(bool)
        first: dict[tuple[str, bytes], float] = {}
        equal = 0
        differing = 0
        for row in rows:
            if not mask[row].any():
                continue
            key = (str(batch.non_tensor_batch["uid"][row]), ids[row][mask[row]].tobytes())
            if key in first:
                is_equal = math.isclose(scores[row], first[key], rel_tol=1e-3, abs_tol=1e-3)
                equal += is_equal
                differing += not is_equal
            else:
                first[key] = scores[row]
        if differing and self.equal_pairs >= FEWEST_PAIRS:
            yield Finding(
                "reward_differs",
                f"{differing} of {equal + differing} answers that equal another one of their group "
                f"have another score; none of {self.equal_pairs} had before",
            )
        elif differing:
            self.varies = True
        self.equal_pairs += equal

    def _check_infos(
        self, batch: DataProto, rows: list[int], scores: list[float]
    ) -> Iterator[Finding]:
        """Compares the scores with the reward function's own info of that name."""
        infos = batch.non_tensor_batch.get(f"{REWARD_INFO}score")
        if infos is None or self.is_another_score:
            return
        differing = []
        for row in rows:
            said = infos[row]
            if isinstance(said, int | float) and not math.isclose(said, scores[row], abs_tol=1e-3):
                differing.append(row)
        if differing and self.equal_infos >= FEWEST_PAIRS:
            row = differing[0]
            yield Finding(
                "reward_differs",
                f"{len(differing)} scores are not what the reward function said, as row {row}: "
                f"{scores[row]:.4g} for {infos[row]:.4g}",
                place_of(batch, row),
            )
        elif differing:
            self.is_another_score = True
        else:
            self.equal_infos += len(rows)


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
        # What a large step was, since which no source's rewards have varied.
        self.large_step: str | None = None
        self.spread = GroupSpread()

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
        if all(source.constant_episodes == 0 for source in self.sources.values()):
            self.large_step = None
        if constant and self.large_step:
            yield Finding("large_step", f"{self.large_step}, since when {'; '.join(constant)}")
        elif constant:
            yield Finding("reward_constant", "; ".join(constant))
        lowest = metrics.get("critic/advantages/min", 1.0)
        highest = metrics.get("critic/advantages/max", 1.0)
        all_zero = max(abs(lowest), abs(highest)) < SMALLEST_ADVANTAGE
        self.spread.add(groups_without_spread(batch, episodes))
        is_fault = all_zero and not constant and not self.solved and self.spread.is_suspicious()
        if is_fault and num_episodes >= FEWEST_EPISODES:
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
