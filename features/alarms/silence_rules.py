"""Finds rewards that pay an answer without a word more than others.

Invariant: only episodes of one group are compared with each other, or of one data source where a
group is one episode; what chance would do is taken off.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from data.protocol import DataProto
from features.alarms.catalogue import Finding
from features.alarms.history import Metrics
from training.batch.episode_rows import EpisodeRows
from training.batch.row_groups import rows_by_key
from training.run.metrics.group_metrics import EpisodeScores, episode_scores

# Steps that are judged together, and how many standard deviations above chance the rewards of their
# empty answers lie.
STEPS = 8
DEVIATIONS = 6.0
# They earned as much more as so many answers that got the most in place of the least: where few
# episodes earn anything, a few may well be empty ones.
FEWEST_PAID = 8


class SilenceRules:
    """Watches whether empty answers earn more than others.

    Args:
        source_key: the column that names a row's source.
        textless_ids: ids of the tokens that are no text; none: nothing is watched.
    """

    def __init__(self, source_key: str, textless_ids: Sequence[int]) -> None:
        self.source_key = source_key
        self.textless_ids = textless_ids
        # For each of the last steps: what empty answers earned above chance, its variance, how far
        # scores of a group lay apart.
        self.steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)

    def check(self, batch: DataProto, episodes: EpisodeRows, metrics: Metrics) -> Iterator[Finding]:
        """Compares a step's empty answers with the others."""
        if not self.textless_ids or metrics.get("response/empty_ratio") == 0:
            return
        found = episode_scores(batch, episodes, self.textless_ids)
        sources = batch.non_tensor_batch.get(self.source_key)
        self.steps.append(self._compare(found, sources))
        above = sum(step[0] for step in self.steps)
        deviation = math.sqrt(sum(step[1] for step in self.steps))
        range_of_scores = max(step[2] for step in self.steps)
        if above > max(DEVIATIONS * deviation, FEWEST_PAID * range_of_scores):
            yield Finding("silence_paid", _describe(found))

    def _compare(
        self, found: EpisodeScores, sources: np.ndarray | None
    ) -> tuple[float, float, float]:
        """Compares the empty answers of each group with all of it; see `steps`."""
        keys = found.uids.tolist()
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


def _describe(found: EpisodeScores) -> str:
    """Says what a step's empty answers and its others earned."""
    empty = found.scores[found.is_empty]
    others = found.scores[~found.is_empty]
    text = f"{len(empty)} of {len(found.scores)} episodes are without a word"
    if not len(empty) or not len(others):
        return f"{text}; in the steps before such answers earned more than others"
    return f"{text} and earned {empty.mean():.3g} on average, the others {others.mean():.3g}"
