"""Finds validation's rows that are training's, too."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from data.rl_dataset import ORIGIN

logger = logging.getLogger(__name__)

# What numbers a row, or says where it comes from, and not what it asks.
NO_PART_OF_A_TASK = ("index", ORIGIN, "extra_info", "uid")


def warn_of_shared_rows(train: object, val: object, prompt_key: str) -> None:
    """Warns where rows of validation are rows of training.

    Args:
        train, val: datasets: lists of rows, or with such a list as `dataframe`. Of others, as
            those that make their rows, nothing is known.
        prompt_key: the column that holds a row's prompt.
    """
    trained = set(_digests(train, prompt_key))
    measured = list(_digests(val, prompt_key))
    shared = sum(digest in trained for digest in measured)
    if shared:
        logger.warning(
            "%d of %d rows of data.val_files are also rows of data.train_files: there validation "
            "measures what was trained on",
            shared,
            len(measured),
        )


def _digests(dataset: object, prompt_key: str) -> Iterator[bytes]:
    """Yields a digest of each row's task: its prompt, or, without one, its columns."""
    rows = getattr(dataset, "dataframe", dataset)
    if not isinstance(rows, Sequence) or isinstance(rows, range | str | bytes):
        return
    for row in rows:
        if isinstance(row, Mapping):
            text = json.dumps(_task_of(row, prompt_key), sort_keys=True, default=repr)
            yield hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _task_of(row: Mapping[str, Any], prompt_key: str) -> Any:
    """Returns what distinguishes the task of a row."""
    if prompt_key in row:
        return row[prompt_key]
    return {key: value for key, value in row.items() if key not in NO_PART_OF_A_TASK}
