"""The order of the training rows, and how the rows of a dataset become a batch.

Invariant: the order is a pure function of (seed, epoch), so that a resumed run continues inside an epoch.
"""

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from data.prompts import Tokenizer, encode_chat, pad_token_id
from data.rl_dataset import collate_fn, normalise_row
from data.seeding import seed_for


class EpochOrder(Sampler[int]):
    """Yields the row numbers of one epoch, from a place inside it.

    Args:
        num_rows: rows of the dataset.
        seed: the run's seed.
        shuffle: a new permutation every epoch; otherwise ascending.
        inner: a sampler of the user's, whose order is taken instead; its `set_epoch(epoch)` is called where it has one.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool, inner: Sampler[int] | None = None) -> None:
        self.num_rows, self.seed, self.shuffle, self.inner = num_rows, seed, shuffle, inner
        self.start(epoch=0, skip=0)

    def start(self, epoch: int, skip: int) -> None:
        """Makes the next iteration give `epoch`'s order without its first `skip` rows."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self) -> Iterator[int]:
        return iter(self._order()[self.skip :])

    def __len__(self) -> int:
        return (len(self.inner) if isinstance(self.inner, Sized) else self.num_rows) - self.skip

    def _order(self) -> Sequence[int]:
        if self.inner is not None:
            if callable(set_epoch := getattr(self.inner, "set_epoch", None)):
                set_epoch(self.epoch)
            # torch's own samplers draw from the global generator.
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_for(self.seed, 0, self.epoch))
                return list(self.inner)
        if not self.shuffle:
            return range(self.num_rows)
        generator = torch.Generator().manual_seed(seed_for(self.seed, 0, self.epoch))
        return torch.randperm(self.num_rows, generator=generator).tolist()


@dataclass(frozen=True)
class PromptCollator:
    """Collates rows of any torch Dataset that gives `input_ids` and `attention_mask` (see `normalise_row`).

    A row without them is tokenised here: `raw_prompt`, or `data.prompt_key`, holds chat messages, or one user message
    as a string.

    Args:
        config: the `DataConfig`.
        collate: makes columns of normalised rows.
    """

    config: Any
    tokenizer: Tokenizer
    collate: Callable[[list[dict[str, Any]]], dict[str, Any]] = collate_fn

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return self.collate([self._normalised(row) for row in rows])

    def _normalised(self, row: dict[str, Any]) -> dict[str, Any]:
        data = self.config
        key = "raw_prompt" if "raw_prompt" in row else data.prompt_key
        if "input_ids" not in row and key in row:
            ids = encode_chat(self.tokenizer, row[key], **data.apply_chat_template_kwargs)
            row = {**row, "input_ids": ids, "attention_mask": [1] * len(ids)}
        pad, limit = pad_token_id(self.tokenizer), data.max_prompt_length
        return normalise_row(row, max_prompt_length=limit, pad_token_id=pad, truncation=data.truncation)


def num_rows(dataset: Dataset) -> int:
    """Counts the rows of a map-style dataset. Raises ValueError for one without a length."""
    if not isinstance(dataset, Sized):
        raise ValueError(f"{type(dataset).__name__} has no __len__; give a map-style torch Dataset")
    return len(dataset)
