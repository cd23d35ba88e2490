"""Keeps the list and the index of all episodes in few parts, whose number hardly grows.

Each file of records becomes a part; FAN parts of one level that follow each other are merged into
one of the next level, as long as that does not grow too large:

    files of records   1 2 3 4   5 6 7 8   9 10
    parts              [1 2 3 4] [5 6 7 8] [9] [10]

So a part is written again a few times at most, and their number grows with the logarithm of that of
the files. Invariant: which parts there are, their numbers and their bytes follow from the files of
records alone, whenever each was added.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from features.viewer.data_files import DataFolder
from features.viewer.list_columns import merge_lists, write_list
from features.viewer.search_index import IndexPart, SearchIndex, merge_indexes

FAN = 4
# No part that is merged holds more: the pairs of its index, and its episodes.
MOST_PAIRS = 1 << 26
MOST_EPISODES = 20_000


@dataclass(frozen=True, kw_only=True)
class ViewerPart(IndexPart):
    """Says what a part of the list and of the index is: list/NUMBER, answers/NUMBER, search/NUMBER.

    Attributes:
        episodes: so many it has, from `first` on.
        level: so often it was merged.
        is_full: it is not merged any more.
    """

    episodes: int
    level: int = 0
    is_full: bool = False

    def files_of(self) -> list[str]:
        """Names its data files."""
        index = [f"search/{self.number}/{file}" for file in range(self.files)]
        return [f"list/{self.number}", f"answers/{self.number}", *index]


class Parts:
    """Adds parts and merges them.

    Args:
        folder: where their files are.
        parts: those that are there already.
        next_number: of the next one that is written.
    """

    def __init__(
        self, folder: DataFolder, parts: Sequence[ViewerPart] = (), *, next_number: int = 0
    ) -> None:
        self._folder = folder
        self.parts = list(parts)
        self.next_number = next_number
        # All that were ever written or handed in: those that were merged lie about still.
        self.known = list(parts)

    def add(self, rows: list[dict[str, Any]], index: SearchIndex, first: int) -> None:
        """Writes the part of a file of records, and merges what is to be merged."""
        number = self._take_number()
        write_list(self._folder, number, rows)
        pairs, files = index.write(self._folder, number)
        self._keep(
            ViewerPart(number=number, first=first, episodes=len(rows), files=files, pairs=pairs),
            instead=0,
        )
        while self._merge_last():
            pass

    def _take_number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    def _keep(self, part: ViewerPart, *, instead: int) -> None:
        """Takes a part in, in place of the last ones."""
        if instead:
            del self.parts[-instead:]
        self.parts.append(part)
        self.known.append(part)

    def _merge_last(self) -> bool:
        """Merges the last parts if there are FAN of one level; says whether it did."""
        last = self.parts[-FAN:]
        if len(last) < FAN or {(part.level, part.is_full) for part in last} != {
            (last[0].level, False)
        }:
            return False
        episodes = sum(part.episodes for part in last)
        if sum(part.pairs for part in last) > MOST_PAIRS or episodes > MOST_EPISODES:
            full = [replace(part, is_full=True) for part in last]
            self.parts[-FAN:] = full
            self.known += full
            return False
        number = self._take_number()
        merge_lists(self._folder, [part.number for part in last], number)
        pairs, files = merge_indexes(self._folder, last, number)
        merged = ViewerPart(
            number=number,
            first=last[0].first,
            episodes=episodes,
            files=files,
            pairs=pairs,
            level=last[0].level + 1,
        )
        self._keep(merged, instead=FAN)
        return True
