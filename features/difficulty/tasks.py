"""Says which tasks a run has: rows of its data, seeds of its environments, and levels of these.

    task   = place x levels + level      place: a row, or a seed from 0
    rows 0, 1 and levels A, B:           0: row 0 of A, 1: row 0 of B, 2: row 1 of A, 3: row 1 of B

A level is an entry of `env_template`. Where there are neither rows nor seeds, the levels are the
tasks, and each group has a fresh seed. Invariant: a task keeps its number as long as the data are
the same, which `marks` tells.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

import numpy as np
import torch

from data.learning_sampler import GivenTask
from data.protocol import DataProto
from features.difficulty.settings import DifficultySettings
from training.config import PPOConfig

# At most so many rows are compared with those of a checkpoint.
MOST_MARKS = 1000


class TaskSet:
    """Gives what each task is, as a map-style dataset: a row, or a `GivenTask`.

    Args:
        config: the run's.
        rows: its training rows; a range where there are none.

    Attributes:
        rows: the rows, if there are any.
        seeds: environment seeds, if there are no rows.
        levels: names of the environments; empty where there is nothing to choose.
    """

    def __init__(self, config: PPOConfig, rows: Any) -> None:
        self.rows: Any = None if isinstance(rows, range) else rows
        self.seeds = config.section(DifficultySettings).seeds if self.rows is None else None
        names = level_names(config) if len(config.environments) > 1 else []
        self.levels = [] if config.plays_dataset_rows else names
        self._descriptions = [
            f"{level.name or level.cls or level.program or level.command} "
            f"{PurePath(level.path or '').name} {sorted(level.kwargs.items())}"
            for level in config.environments
        ]

    def __len__(self) -> int:
        return self.places * max(len(self.levels), 1)

    @property
    def places(self) -> int:
        """Counts the rows, or the seeds; one where the levels alone are the tasks."""
        if self.rows is not None:
            return len(self.rows)
        return self.seeds or 1

    def __getitem__(self, task: int) -> Any:
        if not 0 <= task < len(self):
            raise IndexError(f"task {task} of {len(self)}")
        place, level = divmod(task, max(len(self.levels), 1))
        row = None if self.rows is None else self.rows[place]
        if self.are_rows:
            return row
        return GivenTask(
            row=row,
            seed=None if self.seeds is None else place,
            environment=level if self.levels else None,
        )

    @property
    def are_rows(self) -> bool:
        """Returns whether each task is a row, and nothing more."""
        return self.rows is not None and not self.levels

    @property
    def have_fresh_seeds(self) -> bool:
        """Returns whether the levels alone are the tasks, so that each group has another seed."""
        return self.rows is None and self.seeds is None

    def on_batch_end(self, batch: DataProto) -> None:
        """Tells the rows of a step's batch, where they want to know."""
        on_batch_end = getattr(self.rows, "on_batch_end", None)
        if callable(on_batch_end):
            on_batch_end(batch)

    def name(self, task: int) -> str:
        """Names a task for people, such as `row 12`, or `seed 7 of Maze`."""
        place, level = divmod(task, max(len(self.levels), 1))
        words = []
        if self.rows is not None:
            words.append(f"row {place}")
        elif self.seeds is not None:
            words.append(f"seed {place}")
        if self.levels:
            words.append(self.levels[level])
        return " of ".join(words)

    @property
    def kind(self) -> str:
        """Says what the tasks are, with their number."""
        words = []
        if self.rows is not None:
            words.append(f"{self.places:,} rows")
        elif self.seeds is not None:
            words.append(f"{self.places:,} environment seeds")
        if self.levels:
            words.append(f"{len(self.levels)} levels")
        return " times ".join(words)

    def marks(self) -> dict[str, str]:
        """Returns what tells these tasks from others: a digest for each of some places.

        Rows that are different each time they are read have none.
        """
        marks = {"levels": _digest(self._descriptions)} if self._descriptions else {}
        if self.rows is None:
            return marks
        most = min(len(self.rows), MOST_MARKS)
        places = np.unique(np.linspace(0, len(self.rows) - 1, most).astype(int)).tolist()
        for place in places:
            once, again = (_digest(self.rows[place]) for _ in range(2))
            if once == again:
                marks[str(place)] = once
        return marks


def level_names(config: PPOConfig) -> list[str]:
    """Names the entries of `env_template`; an environment that has several is NAME#2 and so on."""
    names: list[str] = []
    for number, level in enumerate(config.environments):
        name = level.name or level.cls or level.program or f"entry {number}"
        same = [other for other in names if other.partition("#")[0] == name]
        names.append(f"{name}#{len(same) + 1}" if same else name)
    return names


def _digest(value: Any) -> str:
    """Returns a digest of a row's content, the same in every process."""
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Adds a value to a digest; of an object of a class that is not known its class alone."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"{{{len(value)}".encode())
        for key in sorted(value, key=str):
            _feed(digest, str(key))
            _feed(digest, value[key])
    elif isinstance(value, list | tuple | np.ndarray):
        entries = cast("Sequence[Any]", value)
        digest.update(f"[{len(entries)}".encode())
        for entry in entries:
            _feed(digest, entry)
    elif value is None or isinstance(value, str | bytes | int | float | np.generic):
        digest.update(f"{type(value).__name__} {value!r};".encode())
    else:
        digest.update(f"{type(value).__qualname__};".encode())
