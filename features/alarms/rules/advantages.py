"""Watches what must hold of the advantages of any estimator, whatever its formula is.

No formula stands here: users change those. Of every estimator advantages are finite, and zero on
what was not sampled. All else is what an estimator says of itself where it is registered
(`EstimatorFacts`): that a better score in a group has no smaller advantage, that equal scores have
none, that advantages rise with returns. The exact formulas are tested in tests/unit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from data.protocol import DataProto
from features.alarms.finding import Finding, Place
from features.alarms.rule import rule
from features.alarms.seen_step import SeenStep
from training.batch.episode_rows import EpisodeRows, uid_of
from training.core_algos import EstimatorFacts, estimator_facts, estimator_needs
from training.core_algos.masked_ops import sampled_sums

# Scores and advantages that differ by less are equal.
EPSILON = 1e-6
# A difference that no rounding makes, of 1 + the number's size.
TOLERANCE = 1e-3
# Pairs of episodes that are ordered otherwise than by their rewards: hardly any where an estimator
# keeps their order, not nearly all where it says nothing of it.
MOST_WRONG = 0.05
MOST_WRONG_UNSAID = 0.9
FEWEST_PAIRS = 8
# Advantages that go so clearly against their returns do not follow them.
AGAINST = -0.5
FEWEST_TOKENS = 8


@rule(
    "advantages_wrong",
    advice=(
        "the estimator, and the index, mask and values that it is given; one that you changed "
        "says what it keeps where it is registered (ordered, compares, follows_returns)"
    ),
    view="sort=-advantage",
    order=120,
)
def wrong_advantages(seen: SeenStep) -> Iterator[Finding]:
    """Finds advantages that break what holds of any estimator, or what theirs says of itself."""
    yield from advantage_faults(seen.batch, seen.episodes, seen.config.algorithm.adv_estimator)


def advantage_faults(
    batch: DataProto, episodes: EpisodeRows, adv_estimator: str
) -> Iterator[Finding]:
    """Does so for an estimator of this name."""
    facts = estimator_facts(adv_estimator)
    yield from _impossible_advantages(batch)
    if facts.follows_returns:
        reads_values = "values" in estimator_needs(adv_estimator)
        yield from _advantages_against_returns(batch, episodes, reads_values)
    says_nothing = facts.ordered is None and "index" in estimator_needs(adv_estimator)
    if facts.ordered or says_nothing or facts.compares == "group":
        yield from _wrong_groups(batch, episodes, facts)


def _impossible_advantages(batch: DataProto) -> Iterator[Finding]:
    """Finds advantages that are not finite, or stand on a token that was not sampled."""
    advantages = batch.batch["advantages"]
    if not bool(advantages.isfinite().all()):
        yield Finding("advantages_wrong", "one is not a finite number")
    outside = advantages.masked_select(~batch.batch["response_mask"].bool())
    number = int(outside.count_nonzero())
    if number:
        yield Finding("advantages_wrong", f"{number} of them stand on tokens that were not sampled")


def _advantages_against_returns(
    batch: DataProto, episodes: EpisodeRows, reads_values: bool
) -> Iterator[Finding]:
    """Finds advantages that fall, over the batch's tokens, where returns less values rise."""
    fields = batch.batch
    sampled = fields["response_mask"].bool() & episodes.real[:, None]
    expected = fields["returns"].masked_select(sampled).double()
    if reads_values:
        expected = expected - fields["values"].masked_select(sampled)
    found = fields["advantages"].masked_select(sampled).double()
    if len(found) < FEWEST_TOKENS:
        return
    expected = expected - expected.mean()
    found = found - found.mean()
    size = float((expected.square().sum() * found.square().sum()).sqrt())
    if expected.abs().max() < TOLERANCE or size == 0:
        return
    correlation = float((expected * found).sum()) / size
    if correlation < AGAINST:
        yield Finding(
            "advantages_wrong",
            f"they fall where returns less values rise (correlation {correlation:.2f})",
        )


def _wrong_groups(
    batch: DataProto, episodes: EpisodeRows, facts: EstimatorFacts
) -> Iterator[Finding]:
    """Compares each episode's mean advantage with its group's scores."""
    mask = batch.batch["response_mask"]
    tokens = _by_episode(batch, episodes, mask)
    scores = _by_episode(batch, episodes, batch.batch["token_level_rewards"])
    means = _by_episode(batch, episodes, batch.batch["advantages"]) / np.maximum(tokens, 1)
    number_of = {int(row): number for number, row in enumerate(episodes.first)}
    equal_have_none = facts.compares == "group" and not facts.whitens_batch
    pairs = 0
    wrong = 0
    for uid, rows in episodes.first_by_role.items():
        members = np.array([number_of[row] for row in rows])
        members = members[tokens[members] > 0]
        if len(members) < 2:
            continue
        found = means[members]
        own = scores[members]
        largest = float(np.abs(found).max())
        if equal_have_none and np.ptp(own) == 0 and largest > TOLERANCE * (1 + abs(own[0])):
            yield Finding(
                "advantages_wrong",
                f"all episodes of group {uid} have the score {own[0]:.3g}, and one has the "
                f"advantage {largest:.3g} in size: there is nothing to compare",
                Place(group=uid_of(uid)),
            )
            return
        is_better = own[:, None] > own + EPSILON
        pairs += int(is_better.sum())
        wrong += int((is_better & (found[:, None] < found - EPSILON)).sum())
    if facts.ordered is False:
        return
    allowed = MOST_WRONG if facts.ordered else MOST_WRONG_UNSAID
    if pairs >= FEWEST_PAIRS and wrong > allowed * pairs:
        yield Finding(
            "advantages_wrong",
            f"in {wrong} of {pairs} pairs within groups the better episode has the smaller "
            "advantage",
        )


def _by_episode(batch: DataProto, episodes: EpisodeRows, tensor: Tensor) -> np.ndarray:
    """Sums each episode's sampled tokens, dummies included: (B, R) -> (E,) float64."""
    sums = sampled_sums(tensor, batch.batch["response_mask"]).numpy()
    return np.array([sums[rows].sum() for rows in episodes.rows])
