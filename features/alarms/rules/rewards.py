"""Finds rewards that were not given, that do not vary, and advantages that are all zero.

It finds what comes of rewards too: large steps after which they no longer vary, entropy that
collapses before they are at their best, silence that pays. The state of `RewardRules` is of the
whole run and goes with its checkpoints. Invariant: only episodes of one group are compared with
each other, or of one data source where a group is one episode; what chance would do is taken off.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import numpy as np
import torch

from data.protocol import DataProto
from features.alarms.finding import Finding, place_of
from features.alarms.rule import RulesWithMemory, rule
from features.alarms.rules.update import STEP_SETTINGS
from features.alarms.seen_step import SeenStep
from features.alarms.spread import GroupSpread, groups_without_spread
from training.batch.episode_rows import REWARD_INFO, EpisodeRows
from training.batch.row_groups import rows_by_key
from training.observers import ObservedRun
from training.run.metrics.group_metrics import EpisodeScores, episode_scores

# Rewards of a source that are remembered, and the chance below which their constancy is no
# accident.
PAST_REWARDS = 4096
CHANCE = 1e-4
FEWEST_EPISODES = 8
# Scores that must have agreed before one that does not is a fault.
FEWEST_PAIRS = 4
# Advantages below it are zero.
SMALLEST_ADVANTAGE = 1e-8
# Entropy that falls below a share of what it was in the two steps before, if that was above a
# least number of nats.
ENTROPY_SHARE = 0.2
LEAST_ENTROPY = 0.1
# Nats a token by which a large step moves the sampled tokens, or the canaries. Small models are
# unsure of the canaries' random tokens: a step must also move them so many times the most so far.
LARGE_STEP = 1.0
LARGE_FACTOR = 5
LARGEST_FIRST_STEP = 3.0
# Steps that are judged together, and how many standard deviations above chance the rewards of their
# empty answers lie.
SILENCE_STEPS = 8
SILENCE_DEVIATIONS = 6.0
# They earned as much more as so many answers that got the most in place of the least: where few
# episodes earn anything, a few may well be empty ones.
FEWEST_PAID = 8
# A step whose mean reward lies within this share of its source's range from the best is as good as
# solved.
NEAR_BEST = 0.1
# What to check where rewards are constant: by whether the policy has earned more, or nothing.
EARNED_MORE = (
    "what changed when rewards last differed: the policy has earned more before (settings, other "
    "alarms, the episodes of that step)"
)
EARNS_ALL_THERE_IS = (
    "whether that is the most that they can get: then they are solved, and harder ones teach more; "
    "if not, the reward function: does it read the answers?"
)


@rule(
    "reward_differs",
    advice=(
        "what lies between the reward's source and token_level_scores; a change that is meant "
        "belongs in token_level_rewards, or alarms.ignore=[reward_differs]"
    ),
    view="sort=-reward",
    color="advantage",
    order=30,
)
def unpaid_rewards(seen: SeenStep) -> Iterator[Finding]:
    """Finds episodes that are trained on with other rewards than the environment gave."""
    batch = seen.batch
    fields = batch.batch
    name = "token_level_scores" if seen.run.paid_by_environment else "environment_rewards"
    if name not in fields:
        return
    sums = fields[name].sum(1, dtype=torch.float64).tolist()
    for rows, facts in seen.played_episodes():
        held = sum(sums[row] for row in rows)
        paid = facts["paid"]
        if facts["ending"] == "overflow":
            paid += seen.config.agent.overflow_reward
        if not math.isclose(held, paid, rel_tol=1e-4, abs_tol=1e-4):
            yield Finding(
                "reward_differs",
                f"episode {batch.non_tensor_batch['episode_id'][rows[0]]} was paid {paid:.4g}, and "
                f"is trained on with {held:.4g}",
                place_of(batch, rows[0]),
            )
            return


class ScoreRules(RulesWithMemory):
    """Watches what a reward function gives: it stays, and equal answers get the same.

    Where a function once gave equal answers different scores, as a judge may, or said another score
    than it gave, that is not watched.
    """

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        # For how many pairs of equal answers, and how many scores, it has held so far.
        self.equal_pairs = 0
        self.equal_infos = 0
        self.varies = False
        self.is_another_score = False

    @rule("reward_differs", order=50)
    def changed_scores(self, seen: SeenStep) -> Iterator[Finding]:
        """Looks at a step's scores; of environments only at whether they stay."""
        batch = seen.batch
        yield from self._check_given(seen)
        if "environment_rewards" in batch.batch:
            return
        scores = batch.batch["token_level_scores"].sum(1).tolist()
        # An episode is scored by its last row.
        is_real = seen.episodes.real.tolist()
        rows = [row for row in seen.episodes.last.tolist() if is_real[row]]
        yield from self._check_pairs(batch, rows, scores)
        yield from self._check_infos(batch, rows, scores)

    def _check_given(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares the scores that episodes are trained on with, with those that were given."""
        batch, given, episodes = seen.batch, seen.given, seen.episodes
        if given is None or len(given) != len(batch):
            return
        given = episodes.fold(given)  # (episodes,), as all below
        scores = episodes.fold(batch.batch["token_level_scores"].sum(1, dtype=torch.float64))
        is_live = episodes.fold(batch.batch["response_mask"].any(1), "amax") > 0
        differing = ((given - scores).abs() > 1e-4 * (1 + given.abs())) & is_live
        if differing.any():
            number = int(differing.nonzero()[0])
            row = int(episodes.first[episodes.real.numpy()[episodes.first]][number])
            yield Finding(
                "reward_differs",
                f"{int(differing.sum())} of {len(given)} episodes are trained on with another "
                f"score than they were given, as that of row {row} with {scores[number]:.4g} for "
                f"{given[number]:.4g}",
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
        past: the last rewards up to the step in which they varied last.
        constant_episodes: for how many episodes they have not varied now.
        constant: what these got.
    """

    best: float = float("-inf")
    past: list[float] = field(default_factory=list)
    constant_episodes: int = 0
    constant: float = 0.0

    def add(self, rewards: list[float]) -> None:
        """Adds a step's rewards."""
        self.best = max(self.best, *rewards)
        if max(rewards) != min(rewards):
            # Those that were all the same count too: how rare another one is they say.
            constant = [self.constant] * self.constant_episodes
            self.past = (self.past + constant + rewards)[-PAST_REWARDS:]
            self.constant_episodes = 0
        elif self.past and rewards[0] == self.best:
            # All of a task's best rewards are as they should be.
            self.constant_episodes = 0
        else:
            self.constant = rewards[0]
            self.constant_episodes += len(rewards)

    def advice(self, reward: float) -> str:
        """Says what to check where rewards have been constant; "": whether any can be earned."""
        if reward < self.best:
            return EARNED_MORE
        if reward > 0:
            return EARNS_ALL_THERE_IS
        return ""

    def is_nearly_solved(self, rewards: list[float]) -> bool:
        """Judges whether a step's rewards are all but the best that the source ever gave."""
        if not self.past:
            return False
        least = min(self.past)
        mean = sum(rewards) / len(rewards)
        return self.best > least and mean >= self.best - NEAR_BEST * (self.best - least)

    def is_suspicious(self, reward: float) -> bool:
        """Judges whether a constant reward has stood for longer than chance would have it.

        Where few episodes earn anything, many steps may well go without: k other rewards among N
        make it (N / (N + m))^k likely that m further episodes have none (the rate is drawn from its
        gamma posterior). Where there never was another one, a few are enough.
        """
        if self.constant_episodes < 2 * FEWEST_EPISODES:
            return False
        if not self.past:
            return True
        others = sum(past != reward for past in self.past)
        seen = len(self.past)
        nats = others * math.log((seen + self.constant_episodes) / seen)
        return nats > -math.log(CHANCE)


class RewardRules(RulesWithMemory):
    """Watches the rewards of each source, and what comes of them."""

    name = "rewards"

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.source_key = run.config.data.reward_fn_key
        self.sources: dict[str, SourceRewards] = defaultdict(SourceRewards)
        # Whether every episode of the last step had its source's best reward, or nearly.
        self.solved = False
        self.nearly_solved = False
        # What a large step was, since which no source's rewards have varied.
        self.large_step: str | None = None
        self.spread = GroupSpread()

    @rule(
        "reward_constant",
        advice=(
            "the reward function: does it read the answers? The answers: can the policy earn "
            "anything?"
        ),
        waits=True,
        view="spread=0&sort=-reward",
        settings=("custom_reward_function.path", "custom_reward_function.name"),
        order=130,
    )
    @rule(
        "advantages_zero",
        advice=(
            "rewards within groups: where all are equal nothing is learned; rollout.n, "
            "filter_groups"
        ),
        waits=True,
        view="spread=0&sort=-reward",
        settings=("rollout.n", "custom_reward_function.path", "custom_reward_function.name"),
    )
    @rule(
        "large_step",
        advice=(
            "that batch's rewards and advantages, the learning rate and grad_clip; go back to the "
            "checkpoint before it"
        ),
        view="sort=-ratio",
        settings=STEP_SETTINGS,
    )
    def constant_rewards(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds sources of constant rewards, but for those at their best; then zero advantages."""
        batch = seen.batch
        episodes = seen.episodes
        metrics = seen.metrics
        constant = []
        advice = ""
        self.solved = True
        self.nearly_solved = True
        num_episodes = 0
        for name, rewards in self._rewards_by_source(batch, episodes).items():
            source = self.sources[name]
            source.add(rewards)
            num_episodes += len(rewards)
            if source.is_suspicious(rewards[0]):
                constant.append(_describe_constant(source, name, rewards[0]))
                advice = advice or source.advice(rewards[0])
            is_solved = max(rewards) == min(rewards) == source.best
            if not is_solved:
                self.solved = False
            if not is_solved and not source.is_nearly_solved(rewards):
                self.nearly_solved = False
        if all(source.constant_episodes == 0 for source in self.sources.values()):
            self.large_step = None
        if constant and self.large_step:
            yield Finding("large_step", f"{self.large_step}, since when {'; '.join(constant)}")
        elif constant:
            yield Finding("reward_constant", "; ".join(constant), advice=advice)
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

    @rule(
        "entropy_collapse",
        advice=(
            "the learning rate, the sign of entropy_coeff, and what the policy says (the episodes)"
        ),
        view="sort=entropy",
        settings=("entropy_coeff", "rollout.temperature"),
        order=310,
    )
    def collapsing_entropy(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds entropy that falls to a fraction within two steps.

        Where the episodes of the step had the best reward, or all but that, it may.
        """
        if self.nearly_solved:
            return
        entropy = seen.metrics.get("actor/entropy")
        before = seen.history.values("actor/entropy")[-2:]
        if entropy is None or not before:
            return
        highest = max(before)
        if highest > LEAST_ENTROPY and entropy < ENTROPY_SHARE * highest:
            yield Finding(
                "entropy_collapse",
                f"actor/entropy fell from {highest:.3g} to {entropy:.3g} nats in two steps",
            )

    @rule("large_step", order=330)
    def far_step(self, seen: SeenStep) -> Iterator[Finding]:
        """Finds a step that moves the policy far, at once and without a second one.

        It is remembered for the rewards that follow it.
        """
        metrics = seen.metrics
        moved = metrics.get("canary/actor_moved", 0.0)
        past = seen.history.values("canary/actor_moved")
        limit = LARGEST_FIRST_STEP
        if past:
            limit = max(LARGE_STEP, LARGE_FACTOR * max(past))
        sampled_moved = abs(metrics.get("actor/ppo_kl", 0.0))
        if moved > limit or sampled_moved > LARGE_STEP:
            text = f"one step moved the policy by {max(moved, sampled_moved):.2g} nats a token"
            self.large_step = text
            yield Finding("large_step", text)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: sources and spread."""
        sources = {}
        for name, source in self.sources.items():
            sources[name] = list(astuple(source))
        return {"sources": sources, "spread": asdict(self.spread)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
        for name, kept in state["sources"].items():
            # Older states have no `constant`.
            self.sources[name] = SourceRewards(*kept)
        if "spread" in state:
            self.spread = GroupSpread(**state["spread"])


def _describe_constant(source: SourceRewards, name: str, reward: float) -> str:
    """Says what a source's episodes got, and whether they have earned more before."""
    text = f"all {source.constant_episodes} episodes of {name} got {reward:g}"
    return f"{text}, {source.best:g} was the most before" if reward < source.best else text


class SilenceRules(RulesWithMemory):
    """Watches whether empty answers earn more than others.

    Where no ids of tokens without text are known, nothing is watched.
    """

    def __init__(self, run: ObservedRun) -> None:
        super().__init__(run)
        self.source_key = run.config.data.reward_fn_key
        self.textless_ids = list(run.textless_ids)
        # For each of the last steps: what empty answers earned above chance, its variance, how far
        # scores of a group lay apart.
        self.steps: deque[tuple[float, float, float]] = deque(maxlen=SILENCE_STEPS)

    @rule(
        "silence_paid",
        advice="the reward: what does it make of an empty text? A policy learns to be silent",
        waits=True,
        view="empty=1&sort=-reward",
        order=140,
    )
    def paid_silence(self, seen: SeenStep) -> Iterator[Finding]:
        """Compares a step's empty answers with the others."""
        if not self.textless_ids or seen.metrics.get("response/empty_ratio") == 0:
            return
        found = episode_scores(seen.batch, seen.episodes, self.textless_ids)
        sources = seen.batch.non_tensor_batch.get(self.source_key)
        self.steps.append(self._compare(found, sources))
        above = sum(step[0] for step in self.steps)
        deviation = math.sqrt(sum(step[1] for step in self.steps))
        range_of_scores = max(step[2] for step in self.steps)
        if above > max(SILENCE_DEVIATIONS * deviation, FEWEST_PAID * range_of_scores):
            yield Finding("silence_paid", _describe_silence(found))

    def _compare(
        self, found: EpisodeScores, sources: np.ndarray | None
    ) -> tuple[float, float, float]:
        """Compares the empty answers of each group with all of it; see `steps`."""
        keys = found.groups.tolist()
        if len(set(keys)) == len(keys):
            names = ["all"] * len(keys) if sources is None else sources[found.rows].tolist()
            keys = [str(name) for name in names]
        above = 0.0
        variance = 0.0
        range_of_scores = 0.0
        for members in rows_by_key(keys).values():
            scores = found.scores[members]
            is_empty = found.is_empty[members]
            empty = int(is_empty.sum())
            others = len(members) - empty
            range_of_scores = max(range_of_scores, float(np.ptp(scores)))
            if empty and others:
                above += float(scores[is_empty].sum() - empty * scores.mean())
                # The variance of `empty` scores that are drawn from the group's, none twice.
                variance += float(empty * others / (len(members) - 1) * scores.var())
        return above, variance, range_of_scores


def _describe_silence(found: EpisodeScores) -> str:
    """Says what a step's empty answers and its others earned."""
    empty = found.scores[found.is_empty]
    others = found.scores[~found.is_empty]
    text = f"{len(empty)} of {len(found.scores)} episodes are without a word"
    if not len(empty) or not len(others):
        return f"{text}; in the steps before such answers earned more than others"
    return f"{text} and earned {empty.mean():.3g} on average, the others {others.mean():.3g}"
