"""How far a run is in its training data, and the rows that come next.

Invariant: what is drawn follows from the position and the run's seed, so that a position is all
that a checkpoint keeps of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from data.epoch_order import EpochOrder
from data.learning_sampler import OUTCOMES, TASK_INDEX, GroupOutcome, LearningSampler
from data.loading import load_object
from data.own_names import keep_own
from data.protocol import DataProto
from training.config import PPOConfig
from training.config.samplers import named_sampler

# Collated rows of a dataset: tensors and object arrays by column.
Rows = dict[str, Any]
Collator = Callable[..., Rows]


@dataclass(frozen=True)
class DataPosition:
    """A place in the training data.

    Attributes:
        epoch: the pass over the data, from 0.
        rows_done: rows of that pass that lie before the place, in the pass's order.
    """

    epoch: int = 0
    rows_done: int = 0

    def after(self, rows: int) -> DataPosition:
        """Returns the position so many rows further in the same epoch."""
        return DataPosition(self.epoch, self.rows_done + rows)

    def next_epoch(self) -> DataPosition:
        """Returns the next epoch's beginning."""
        return DataPosition(self.epoch + 1, 0)


class RowStream:
    """Draws a step's number of rows at a time, epoch after epoch, without end.

    Args:
        loader: gives batches of `rows_per_step` rows, in `order`.
        order: the rows' order in each epoch.
        rows_per_step: rows of a batch.
        batch_size: `data.train_batch_size`, which messages name.

    Attributes:
        position: where the next rows are drawn from.
    """

    def __init__(
        self, loader: DataLoader, order: EpochOrder, *, rows_per_step: int, batch_size: int
    ) -> None:
        self.loader = loader
        self.order = order
        self.rows_per_step = rows_per_step
        self.batch_size = batch_size
        self.position = DataPosition()
        self._batches: Iterator[Rows] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Counts the batches of a whole epoch."""
        return len(self.order) // self.rows_per_step

    @property
    def learns(self) -> bool:
        """Returns whether the sampler is told what happened; rows then have a `task_index`."""
        return self.order.learns

    def learn(self, batch: DataProto, outcomes: Sequence[GroupOutcome] = ()) -> None:
        """Tells the sampler of a user's, and the dataset, of a step's batch with its rewards.

        The sampler's `update(batch)` and the dataset's `on_batch_end(batch)`, where there are such.

        Args:
            outcomes: what came of the step's groups, those that were left out among them.
        """
        if self.learns:
            told = replace(batch, meta_info=batch.meta_info | {OUTCOMES: list(outcomes)})
            self.order.update(told)
        on_batch_end = getattr(self.loader.dataset, "on_batch_end", None)
        if callable(on_batch_end):
            on_batch_end(batch)

    def seek(self, position: DataPosition) -> None:
        """Makes the next rows be those at this position."""
        self.position = position
        self.close()

    def close(self) -> None:
        """Ends the loader's workers; a later draw goes on where this one ended."""
        self._batches = None

    def take_back(self, batch: DataProto) -> None:
        """Tells the sampler of a step's batch that a checkpoint had in flight."""
        tasks = batch.non_tensor_batch.get(TASK_INDEX)
        if tasks is not None:
            uids = batch.non_tensor_batch["uid"].tolist()
            of_group = dict(zip(uids, tasks.tolist(), strict=True))
            self.order.take_back(int(batch.meta_info["global_steps"]), list(of_group.values()))

    def draw(self, step: int, so_far: Sequence[GroupOutcome] = ()) -> Rows:
        """Draws the next rows; those of a sampler that learns have a `task_index` (rows,) int64.

        Args:
            step: the rows are for.
            so_far: what came of the step's groups that were drawn before these.

        Raises:
            ValueError: a whole epoch gave no batch.
        """
        self.order.begin_draw(step, so_far)
        while True:
            if self._batches is None:
                self.order.start(self.position.epoch, self.position.rows_done)
                self._batches = iter(self.loader)
            rows = next(self._batches, None)
            if rows is not None:
                self.position = self.position.after(self.rows_per_step)
                if self.learns:
                    rows = keep_own(rows, (TASK_INDEX,), "the dataset's rows: a column")
                    rows[TASK_INDEX] = np.array(self.order.take_drawn(), dtype=np.int64)
                return rows
            if self.position.rows_done == 0:
                raise ValueError(
                    f"epoch {self.position.epoch} gave no batch of "
                    f"data.train_batch_size={self.batch_size} rows: the sampler is exhausted or "
                    "shorter than a batch; its __iter__ must start anew each time"
                )
            self.seek(self.position.next_epoch())


def open_row_stream(
    config: PPOConfig, dataset: Dataset, collator: Collator, sampler: Sampler[int] | None
) -> RowStream:
    """Opens the stream of the training rows, a step's number at a time.

    Args:
        dataset: the training rows; a `LearningSampler` with tasks of its own has those in their
            place.
        sampler: None: the one that `data.sampler.name` names, else as `data.shuffle` says.

    Raises:
        ValueError: there are fewer rows than a step has.
    """
    rows_per_step = config.prompts_per_step
    batch_size = config.data.train_batch_size
    if sampler is None:
        sampler = _open_named_sampler(config, dataset)
    if isinstance(sampler, LearningSampler) and sampler.tasks is not None:
        dataset = sampler.tasks
    order = EpochOrder(dataset, config.data.run_seed, config.data.shuffle, sampler)
    if len(order) < rows_per_step:
        raise ValueError(
            f"data.train_batch_size={batch_size} is more than the {order.num_rows} training rows; "
            "make it smaller or give more rows"
        )
    loader = DataLoader(
        dataset,
        batch_size=rows_per_step,
        sampler=order,
        collate_fn=collator,
        # Processes would draw rows before the sampler knows of the steps that come first.
        num_workers=0 if order.learns else _loader_processes(config),
        drop_last=True,
    )
    return RowStream(loader, order, rows_per_step=rows_per_step, batch_size=batch_size)


def _open_named_sampler(config: PPOConfig, dataset: Dataset) -> Sampler[int] | None:
    """Opens the sampler of a feature that `data.sampler.name` names; None where it names none."""
    name = config.data.sampler.name
    if name is None:
        return None
    opened: Sampler[int] = load_object(named_sampler(name), f"data.sampler.name={name}")(
        config, dataset
    )
    return opened


def make_val_dataloader(
    config: PPOConfig, dataset: Dataset | None, collator: Collator
) -> DataLoader | None:
    """Makes the loader of the validation rows; None where there are none."""
    if dataset is None:
        return None
    order = EpochOrder(dataset, config.data.run_seed, config.data.validation_shuffle)
    return DataLoader(
        dataset,
        batch_size=config.data.val_batch_size or order.num_rows,
        sampler=order,
        collate_fn=collator,
        num_workers=_loader_processes(config),
    )


def _loader_processes(config: PPOConfig) -> int:
    """Returns the processes that load rows; tasks of environments cost nothing to read."""
    return 0 if config.environments else config.data.dataloader_num_workers
