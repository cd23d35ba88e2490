"""Counts the tokens that a run samples to train on, those that are discarded included.

    played      a batch of a step: all groups that dynamic sampling draws, greedy baselines,
                attempts that failed and were played again, and branches
    take        the step's count goes with its batch, into a checkpoint's steps in flight, too
    begin       of its update: the count is the run's

So runs are compared, and end (`trainer.total_sampled_tokens`), at the same number, whatever an
algorithm discards. Validation does not count, nor what is prefilled. Invariant: a run that is
resumed counts what it would have counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from data.protocol import DataProto

# In the meta_info of a step's batch: tokens that were sampled for it.
SAMPLED_TOKENS = "sampled_tokens"


class SampledTokens:
    """Counts the run's sampled tokens.

    Args:
        limit: with so many the run ends; None: it does not.

    Attributes:
        so_far: of the steps whose updates have begun.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.so_far = 0
        # Of steps that are being generated, maybe several at once.
        self._of_steps: Counter[int] = Counter()

    @property
    def are_enough(self) -> bool:
        """Returns whether the run has sampled as many as it may."""
        return self.limit is not None and self.so_far >= self.limit

    def played(self, batch: DataProto, info: Mapping[str, Any]) -> None:
        """Counts a batch that was played.

        Args:
            info: of what was to be played: `global_steps`, `validate`.
        """
        if not info["validate"]:
            self._of_steps[info["global_steps"]] += count_sampled_tokens(batch)

    def take(self, step: int) -> int:
        """Returns what was counted of a step since it was asked for last."""
        return self._of_steps.pop(step, 0)

    def begin(self, batch: DataProto) -> None:
        """Counts a step for the run; its number leaves the batch."""
        self.so_far += int(batch.meta_info.pop(SAMPLED_TOKENS, 0))


def count_sampled_tokens(batch: DataProto) -> int:
    """Counts the tokens that were sampled for a batch: those of its rows, or of its episodes.

    An episode's are those of its turns, trained on or not, of its failed attempts and its branches.
    """
    facts = batch.non_tensor_batch.get("episode_facts")
    if facts is None:
        return int(batch.batch["response_mask"].sum())
    return sum(
        each["sampled_tokens"] + each.get("discarded_tokens", 0)
        for each in facts
        if each is not None
    )
