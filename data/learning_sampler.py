"""Defines what a sampler of tasks is told, and what it may do beside giving row numbers.

    sampler gives task 7 -> a group of episodes plays it -> GroupOutcome(task=7, rewards=…)

A sampler that has an `update` learns. The rows that it gives then carry their number as
`task_index`, and `update(batch)` sees in the batch's meta_info, under OUTCOMES, what came of every
group of the step, of those too that dynamic sampling left out. Invariant: validation draws no row
from it and tells it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Sampler

from data.protocol import DataProto

# In a batch: the number of each row's task among those that the sampler chooses from.
TASK_INDEX = "task_index"
# In the meta_info of the batch that `update` sees: a `GroupOutcome` for each group of the step.
OUTCOMES = "outcomes"


@dataclass(frozen=True, kw_only=True)
class GivenTask:
    """Says what a group of episodes plays; a dataset of tasks may give it in the place of a row.

    Attributes:
        row: what the environment's `reset` is given beside the seed; None: nothing.
        seed: of the environment; None: that of step and group.
        environment: number of the environment in `env_template`; None: the suite chooses.
    """

    row: Any = None
    seed: int | None = None
    environment: int | None = None


@dataclass(frozen=True, kw_only=True)
class GroupOutcome:
    """Says what came of a group of episodes.

    Attributes:
        task: its `task_index`.
        rewards: of the episodes that ended as they should, as they were paid.
        failed: episodes that did not: their environment crashed or hung, or nobody scored them.
        tokens: sampled in all of its episodes.
    """

    task: int
    rewards: tuple[float, ...] = ()
    failed: int = 0
    tokens: int = 0

    @property
    def has_spread(self) -> bool:
        """Returns whether two of its rewards differ, so that they say which episode was better."""
        return len(set(self.rewards)) > 1


class LearningSampler(Sampler[int]):
    """Gives numbers of tasks by what came of earlier ones; every method but `__iter__` may be left.

    A torch Sampler with an `update` alone learns as well; it is iterated anew where a run is
    resumed, and the rows of the epoch that were drawn are left out.

    Attributes:
        tasks: a map-style dataset of what the numbers stand for, in the place of the training rows;
            None: they are the numbers of rows.
    """

    tasks: Any = None

    def __iter__(self) -> Iterator[int]:
        """Yields numbers, from the place that `start` named; each when it is drawn."""
        raise NotImplementedError

    def start(self, epoch: int, skip: int) -> None:
        """Makes the next iteration begin in this epoch, behind its first `skip` numbers."""

    def begin_draw(self, step: int, so_far: Sequence[GroupOutcome]) -> None:
        """Sees for which step the numbers are that come next.

        Args:
            so_far: what came of the step's groups that were drawn before, where dynamic sampling
                draws further ones; they are told once more by `update`, when the step is made.
        """

    def take_back(self, step: int, tasks: Sequence[int]) -> None:
        """Sees which tasks a step plays that a checkpoint had in flight: they are drawn already."""

    def update(self, batch: DataProto) -> None:
        """Sees a step that was made, with OUTCOMES in its meta_info."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps: numbers, strings, tensors, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint's `state_dict`, which was not empty."""
