"""Tells, of a file whose pickle is read without code, that it wanted more."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NotPlain(pickle.UnpicklingError, ValueError):
    """Reports a file whose pickle holds more than tensors and numbers, or is none."""


@contextmanager
def reading_plainly(path: str | Path) -> Iterator[None]:
    """Raises NotPlain where the block finds a pickle that is refused.

    torch would advise to read it with the code that it names.
    """
    try:
        yield
    except NotPlain:
        raise
    except pickle.UnpicklingError as error:
        raise NotPlain(
            f"{path} is not read: its pickle is damaged, or names more than tensors and numbers, "
            "which could run code"
        ) from error
