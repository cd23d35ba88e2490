"""Statistics over the groups of a batch: means, sums and deviations of the rows that share a uid.

Invariant: statistics are computed in float64, so that a group of equal scores has a deviation of
zero and not a rounding error over epsilon. A row without a sampled token leaves its group's
statistics. Example, with the scores of five rows:

    index     =   a    a    b    b    b
    scores    =   1    3    0    6    -      the last row has no sampled token: it is not valid
    mean      =   2    2    3    3    3
    deviation =  -1    1   -3    3    0
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from data.warn_once import warn_once
from training.core_algos.masked_ops import sampled_sums
from training.core_algos.registry import Advantages


def consecutive_ids(keys: Sequence[Any] | np.ndarray, device: torch.device | None = None) -> Tensor:
    """Numbers keys from 0 on, equal ones alike: (len(keys),) int64."""
    # As strings: object arrays may mix uids with numbers, which cannot be sorted together.
    names = np.asarray(keys).astype(str)
    _, ids = np.unique(names, return_inverse=True)
    return torch.from_numpy(ids).to(device)


@dataclass(frozen=True)
class Groups:
    """Holds which group each of B entries belongs to, and computes statistics over the groups.

    All methods take and return (B,); each entry gets the statistic of its own group.

    Attributes:
        ids: (B,) int64, the group of each entry, from 0 on.
        valid: (B,) bool, the entries that count in their group's statistics.
    """

    ids: Tensor
    valid: Tensor

    def sum(self, per_entry: Tensor) -> Tensor:
        """Sums over the group, over entries that are not valid too."""
        return torch.zeros_like(per_entry).index_add(0, self.ids, per_entry)[self.ids]

    def max(self, per_entry: Tensor) -> Tensor:
        """Takes the maximum over the group, over entries that are not valid too."""
        lowest = per_entry.new_full(per_entry.shape, -torch.inf)
        return lowest.scatter_reduce(0, self.ids, per_entry, "amax")[self.ids]

    @cached_property
    def size(self) -> Tensor:
        """Counts the valid entries of the group, float64."""
        return self.sum(self.valid.double())

    def mean(self, per_entry: Tensor) -> Tensor:
        """Averages the valid entries of the group; 0 where there are none."""
        return self.sum(torch.where(self.valid, per_entry, 0)) / self.size.clamp(min=1)

    def deviation(self, per_entry: Tensor) -> Tensor:
        """Subtracts the group's mean; 0 where an entry is not valid."""
        return torch.where(self.valid, per_entry - self.mean(per_entry), 0)

    def std(self, deviation: Tensor) -> Tensor:
        """Computes the group's unbiased standard deviation of `deviation`; 0 of a single entry."""
        return (self.sum(deviation**2) / (self.size - 1).clamp(min=1)).sqrt()


@dataclass(frozen=True)
class ScoredGroups(Groups):
    """Holds the group and the score of each row (B,), for estimators with one number per row.

    Attributes:
        scores: (B,) float64, each row's reward, summed over its sampled tokens.
        response_mask: (B, response_len), not 0 on sampled tokens.
        sampled: (B, response_len) bool, the mask as truth values; a row is valid if it has any.
        dtype: the dtype of advantages, at least float32.
    """

    scores: Tensor
    response_mask: Tensor
    sampled: Tensor
    dtype: torch.dtype

    @classmethod
    def from_rewards(
        cls, token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray
    ) -> Self:
        """Scores each row and groups the rows by `index`, (B,) the prompt group (uid) of each."""
        sampled = response_mask.bool()
        return cls(
            ids=consecutive_ids(index, token_level_rewards.device),
            valid=sampled.any(-1),
            scores=sampled_sums(token_level_rewards, sampled),
            response_mask=response_mask,
            sampled=sampled,
            dtype=torch.promote_types(token_level_rewards.dtype, torch.float32),
        )

    @cached_property
    def deviations(self) -> Tensor:
        """Returns each score minus its group's mean: (B,), 0 where a row is not valid."""
        return self.deviation(self.scores)

    def score_std(self) -> Tensor:
        """Returns the unbiased standard deviation of each row's group's scores: (B,)."""
        return self.std(self.deviations)

    def alone(self) -> Tensor:
        """Returns which valid rows are their group's only row, invalid ones included: (B,) bool."""
        rows = self.sum(torch.ones_like(self.scores))
        return self.valid & (rows == 1)

    def advantages(self, per_row: Tensor, if_alone: Tensor | None = None) -> Advantages:
        """Gives each row's number to its sampled tokens; a group of one row keeps its raw score.

        Args:
            per_row: (B,) the advantage of each row.
            if_alone: (B,) what a group of one row gets in place of its raw score.
        Returns: advantages, returns (the same): (B, response_len), zero outside the mask.
        """
        alone = self.alone()
        if alone.any():
            warn_once(
                __name__,
                "some groups have a single sample: it keeps its raw score as advantage "
                "(rollout.n > 1?)",
            )
        if if_alone is None:
            if_alone = self.scores
        return self.spread(torch.where(alone, if_alone, per_row))

    def spread(self, per_row: Tensor) -> Advantages:
        """Gives each row's number to its sampled tokens: (B,) -> twice (B, response_len)."""
        advantages = torch.where(self.sampled, per_row.to(self.dtype).unsqueeze(-1), 0)
        return advantages, advantages
