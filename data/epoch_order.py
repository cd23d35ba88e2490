"""Orders the rows of an epoch.

Invariant: the order is a pure function of (seed, epoch), so that a resumed run continues inside an
epoch.
"""

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from data.seeds import seed_for


class EpochOrder(Sampler[int]):
    """Yields the row numbers of one epoch, from a place inside it.

    Args:
        dataset: whose rows are meant, a map-style one.
        seed: the run's seed.
        shuffle: a new permutation every epoch; otherwise ascending.
        inner: a sampler of the user's, whose order is taken instead. Where it has a `set_epoch`, as
            torch's DistributedSampler, that is called with the epoch's number before the order is
            taken, also where a resumed run begins inside the epoch.
    """

    def __init__(
        self, dataset: Any, seed: int, shuffle: bool, inner: Sampler[int] | None = None
    ) -> None:
        self.num_rows = len(dataset)
        self.seed = seed
        self.shuffle = shuffle
        self.inner = inner
        self.start(epoch=0, skip=0)

    def start(self, epoch: int, skip: int) -> None:
        """Makes the next iteration give `epoch`'s order without its first `skip` rows."""
        self.epoch = epoch
        self.skip = skip

    def __iter__(self) -> Iterator[int]:
        return iter(self._order()[self.skip :])

    def __len__(self) -> int:
        rows = len(self.inner) if isinstance(self.inner, Sized) else self.num_rows
        return rows - self.skip

    def _order(self) -> Sequence[int]:
        """Makes the whole order of the epoch."""
        seed = seed_for(self.seed, 0, self.epoch)
        if self.inner is not None:
            set_epoch = getattr(self.inner, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(self.epoch)
            # torch's own samplers draw from the global generator.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                return list(self.inner)
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(self.num_rows, generator=generator).tolist()
