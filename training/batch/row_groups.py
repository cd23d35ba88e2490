"""Groups rows by a key, cuts groups into equal parts and shuffles them whole.

Invariant: every row appears exactly once, groups stay in the order of their first rows unless they
are shuffled, and the rows of a group stay side by side in their own order.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


def rows_by_key(keys: Iterable[Key]) -> dict[Key, list[int]]:
    """Lists the row numbers of each key, keys in order of appearance."""
    groups: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return groups


def rows_of_parts(uids: Sequence[Hashable], count: int) -> list[list[list[int]]]:
    """Lists the groups of rows of each of `count` parts, in order of appearance.

    Every part has the same number of groups, or one more: six uids a a b b c c in two parts give
    [[[0, 1], [2, 3]], [[4, 5]]].
    """
    groups = list(rows_by_key(uids).values())
    numbers_of_parts = np.array_split(np.arange(len(groups)), count)
    return [[groups[number] for number in numbers] for numbers in numbers_of_parts]


def shuffled_groups(uids: Sequence[Hashable], generator: torch.Generator) -> Tensor:
    """Draws an order of rows that permutes groups and keeps each group's rows together, in order.

    It depends on the grouping and the generator's state alone, not on what the uids are.

    Returns: (rows,) int64.
    """
    groups = list(rows_by_key(uids).values())
    order = torch.randperm(len(groups), generator=generator).tolist()
    rows: list[int] = []
    for number in order:
        rows.extend(groups[number])
    return torch.tensor(rows, dtype=torch.int64)
