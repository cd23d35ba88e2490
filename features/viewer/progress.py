"""Shows how far the making of a viewer is: a bar where somebody watches, lines elsewhere.

Invariant: what is shown goes to standard error, the first line before an episode is read.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

from training.run.progress import LINE_S, somebody_watches


@contextmanager
def showing(episodes: int, files: int) -> Iterator[Callable[[], None]]:
    """Says how many episodes are to be read, and hands out what is called after each of them."""
    say(f"reading {episodes:,} episodes of {files:,} files")
    if somebody_watches():
        with tqdm(total=episodes, unit=" episodes", leave=False, dynamic_ncols=True) as bar:
            yield lambda: _advance(bar)
    else:
        yield Lines(episodes).advance


def _advance(bar: tqdm) -> None:
    bar.update()


def say(text: str) -> None:
    """Prints a line at once; a process without standard error says nothing."""
    if sys.stderr is not None:
        print(text, file=sys.stderr, flush=True)


class Lines:
    """Says every LINE_S seconds how far it is.

    Args:
        total: the episodes that are read.
        clock: seconds that pass, from any beginning.
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = clock()
        self._said = self._began
        self._read = 0

    def advance(self) -> None:
        """Counts an episode."""
        self._read += 1
        now = self._clock()
        if now - self._said < LINE_S:
            return
        self._said = now
        left_s = (now - self._began) / self._read * max(0, self._total - self._read)
        say(f"{self._read:,} of {self._total:,} episodes, about {left_s:.0f} s more")
