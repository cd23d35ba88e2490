"""Judges whether a batch without any spread in its groups is chance.

A policy that has nearly learnt its tasks, or has just begun, often has groups whose scores are all
equal. All of a few groups may be so, step after step. Invariant: where spread has been seen before,
groups without any are a finding only once chance hardly has them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from data.protocol import DataProto
from training.batch.episode_rows import EpisodeRows
from training.batch.row_groups import rows_by_key
from training.run.metrics.group_metrics import SMALLEST_SPREAD, episode_scores

# Groups that are remembered, and the chance below which none with a spread is no accident.
PAST_GROUPS = 256
CHANCE = 1e-4
# Where none has been seen with a spread yet.
FEWEST_GROUPS = 16


def groups_without_spread(batch: DataProto, episodes: EpisodeRows) -> list[bool]:
    """Tells of each group of several episodes whether their scores are equal."""
    found = episode_scores(batch, episodes, textless_ids=())
    return [
        bool(np.ptp(found.scores[members]) < SMALLEST_SPREAD)
        for members in rows_by_key(found.groups.tolist()).values()
        if len(members) > 1
    ]


@dataclass
class GroupSpread:
    """Remembers which groups had no spread.

    Attributes:
        past: of the last groups, up to the last step that had a spread, whether each had none.
        flat: how many groups have had none since.
        last: how many groups the last step had.
    """

    past: list[bool] = field(default_factory=list)
    flat: int = 0
    last: int = 0

    def add(self, without_spread: Sequence[bool]) -> None:
        """Adds a step's groups."""
        self.last = len(without_spread)
        if all(without_spread):
            self.flat += len(without_spread)
        else:
            since = [True] * self.flat
            self.past = [*self.past, *since, *without_spread][-PAST_GROUPS:]
            self.flat = 0

    def is_suspicious(self) -> bool:
        """Judges whether advantages that are all zero are more than chance.

        They are where a group has a spread, and where none of FEWEST_GROUPS ever had one. Otherwise
        the groups before tell how often none has: by Laplace's rule, k more groups after f without
        spread of n are all without with the chance (f+1)...(f+k) / (n+2)...(n+1+k). The next step
        is counted as one of these, since the alarm waits for it.
        """
        if self.flat == 0:
            return True
        more = self.flat + self.last
        if not self.past:
            return more >= FEWEST_GROUPS
        without, count = sum(self.past), len(self.past)
        log_chance = (
            math.lgamma(without + 1 + more)
            - math.lgamma(without + 1)
            - math.lgamma(count + 2 + more)
            + math.lgamma(count + 2)
        )
        return log_chance < math.log(CHANCE)
