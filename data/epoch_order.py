"""Orders the rows of an epoch.

Invariant: the order is a pure function of (seed, epoch), so that a resumed run continues inside an
epoch; but for a user's sampler that learns from what happened (`update`), whose order follows from
its own state as well.
"""

from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from data.learning_sampler import GroupOutcome, LearningSampler
from data.seeds import seed_for


class EpochOrder(Sampler[int]):
    """Yields the row numbers of one epoch, from a place inside it.

    Args:
        dataset: whose rows are meant, a map-style one.
        seed: the run's seed.
        shuffle: a new permutation every epoch; otherwise ascending.
        inner: a sampler of the user's, whose order is taken instead. Where it has a `set_epoch`, as
            torch's DistributedSampler, that is called with the epoch's number before the order is
            taken, also where a resumed run begins inside the epoch. One that has an `update` is
            asked for a row when that is drawn, and not for the whole order before; one that is a
            `LearningSampler` is told where to begin, too.

    Attributes:
        drawn: with a sampler that learns, the rows given since the last `take_drawn`.
    """

    def __init__(
        self, dataset: Any, seed: int, shuffle: bool, inner: Sampler[int] | None = None
    ) -> None:
        self.num_rows = len(dataset)
        self.seed = seed
        self.shuffle = shuffle
        self.inner = inner
        self.drawn: list[int] = []
        self.start(epoch=0, skip=0)

    def start(self, epoch: int, skip: int) -> None:
        """Makes the next iteration give `epoch`'s order without its first `skip` rows."""
        self.epoch = epoch
        self.skip = skip

    @property
    def learns(self) -> bool:
        """Returns whether the user's sampler is told what happened."""
        return callable(getattr(self.inner, "update", None))

    def take_drawn(self) -> list[int]:
        """Returns the rows that were given since the last time, of a sampler that learns."""
        drawn = self.drawn
        self.drawn = []
        return drawn

    def begin_draw(self, step: int, so_far: Sequence[GroupOutcome]) -> None:
        """Tells the sampler for which step it draws, and what came of that step's groups so far."""
        if isinstance(self.inner, LearningSampler):
            self.inner.begin_draw(step, so_far)

    def take_back(self, step: int, tasks: Sequence[int]) -> None:
        """Tells the sampler which tasks a step in flight of a checkpoint plays."""
        if isinstance(self.inner, LearningSampler):
            self.inner.take_back(step, tasks)

    def update(self, batch: Any) -> None:
        """Tells the user's sampler of a step's batch, where it wants to know."""
        if self.learns:
            self.inner.update(batch)  # type: ignore[union-attr]

    def state_dict(self) -> dict[str, Any]:
        """Returns what the user's sampler has a checkpoint keep; empty where it has no such."""
        own_state = getattr(self.inner, "state_dict", None)
        return dict(own_state()) if callable(own_state) else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the user's sampler go on from its `state_dict`."""
        load_own_state = getattr(self.inner, "load_state_dict", None)
        if state and callable(load_own_state):
            load_own_state(state)

    def __iter__(self) -> Iterator[int]:
        if self.learns:
            return self._drawn_one_by_one()
        return iter(self._order()[self.skip :])

    def _drawn_one_by_one(self) -> Iterator[int]:
        """Yields the epoch's rows as the user's sampler gives them, each when it is drawn."""
        assert self.inner is not None
        self._begin_epoch()
        skip = self.skip
        if isinstance(self.inner, LearningSampler):
            self.inner.start(self.epoch, skip)
            skip = 0
        own_state = torch.Generator().manual_seed(seed_for(self.seed, 0, self.epoch)).get_state()
        rows = iter(self.inner)
        place = 0
        self.drawn = []
        while True:
            # torch's own samplers draw from the global generator.
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(own_state)
                row = next(rows, None)
                own_state = torch.get_rng_state()
            if row is None:
                return
            place += 1
            if place > skip:
                self.drawn.append(int(row))
                yield row

    def __len__(self) -> int:
        rows = len(self.inner) if isinstance(self.inner, Sized) else self.num_rows
        return rows - self.skip

    def _begin_epoch(self) -> None:
        """Tells the user's sampler the epoch's number, where it wants to know."""
        set_epoch = getattr(self.inner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(self.epoch)

    def _order(self) -> Sequence[int]:
        """Makes the whole order of the epoch."""
        seed = seed_for(self.seed, 0, self.epoch)
        if self.inner is not None:
            self._begin_epoch()
            # torch's own samplers draw from the global generator.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return list(self.inner)
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_rows, generator=generator).tolist()
