"""Shows how far a long generation is: a bar where somebody watches, lines of the log elsewhere.

A thread looks at the counts of what plays (`data/play_counts.py`), here or on the ranks, while a
generation runs. Invariant: a generation shorter than FIRST_BAR_S shows nothing, and one shorter
than LINE_S no line; what is printed meanwhile stands whole above the bar.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TextIO

from tqdm.auto import tqdm

from data.play_counts import REPORT_S, REPORTS, Played
from training.observers import Observer

logger = logging.getLogger(__name__)
# Until a bar appears, and between two looks.
FIRST_BAR_S = 3.0
# Between two lines.
LINE_S = 20.0
# The tokens a second are those of so many seconds.
RATE_S = 30.0
BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress(Observer):
    """Shows the generations of a run; several threads may generate at once.

    Args:
        form: `trainer.progress`; auto: a bar in a terminal or a notebook, else lines.
        read: returns how far what plays is.
    """

    def __init__(
        self,
        form: Literal["auto", "bar", "lines", "off"],
        read: Callable[[], Played] = REPORTS.read,
    ) -> None:
        self.form = form
        self.read = read
        self._lock = threading.Lock()
        self._labels: list[str] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def generation_begins(self, step: int, validate: bool) -> None:
        """Shows the generation, once it takes long."""
        self._begin("validation" if validate else f"step {step}")

    def generation_ends(self, step: int, validate: bool) -> None:
        """Shows it no more."""
        self._end("validation" if validate else f"step {step}")

    @contextmanager
    def showing(self, label: str) -> Iterator[None]:
        """Shows the generation that the block makes, once it takes long.

        Args:
            label: names it, as in "step 3".
        """
        self._begin(label)
        try:
            yield
        finally:
            self._end(label)

    def _begin(self, label: str) -> None:
        if self.form == "off":
            return
        with self._lock:
            self._labels.append(label)
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._show, args=(self._ended,), name="progress", daemon=True
                )
                self._thread.start()

    def _end(self, label: str) -> None:
        if self.form == "off":
            return
        with self._lock:
            self._labels.remove(label)
            thread = None
            if not self._labels:
                thread = self._thread
                self._thread = None
                self._ended.set()
        if thread is not None:
            thread.join()

    def _show(self, ended: threading.Event) -> None:
        """Shows what plays until it has ended; what goes wrong here costs the show alone."""
        try:
            start = time.monotonic()
            rate = TokenRate()
            if ended.wait(FIRST_BAR_S):
                return
            rate.add(self.read().tokens)
            if self.form == "bar" or (self.form == "auto" and somebody_watches()):
                self._show_bar(ended, start, rate)
            else:
                self._show_lines(ended, rate)
        except Exception:
            logger.warning("the progress of this generation is not shown", exc_info=True)

    def _show_lines(self, ended: threading.Event, rate: "TokenRate") -> None:
        wait_s = LINE_S - FIRST_BAR_S
        while not ended.wait(wait_s):
            wait_s = LINE_S
            played = self.read()
            logger.info("%s: %s", self._label(), describe(played, rate.add(played.tokens)))

    def _show_bar(self, ended: threading.Event, start: float, rate: "TokenRate") -> None:
        with ExitStack() as stack:
            bar = stack.enter_context(
                tqdm(
                    desc=self._label(),
                    total=self.read().episodes,
                    leave=False,
                    dynamic_ncols=True,
                    bar_format=BAR_FORMAT,
                )
            )
            # It counts from when the generation began.
            bar.start_t -= time.monotonic() - start
            stack.enter_context(printing_above(bar))
            wait_s = 0.0
            while not ended.wait(wait_s):
                wait_s = REPORT_S / 2
                played = self.read()
                bar.total = played.episodes
                bar.n = played.ended
                bar.set_description_str(self._label(), refresh=False)
                tokens_per_s = rate.add(played.tokens)
                bar.set_postfix_str(
                    f"{tokens_per_s:,.0f} tokens/s, slowest {played.oldest_s:.0f} s", refresh=False
                )
                bar.refresh()

    def _label(self) -> str:
        with self._lock:
            return ", ".join(dict.fromkeys(self._labels))


class TokenRate:
    """Measures the tokens a second of the last RATE_S seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def add(self, tokens: int) -> float:
        """Notes a count of all tokens; returns tokens a second, 0 at first."""
        now = time.monotonic()
        self._samples.append((now, tokens))
        # One that is older stays, so that there is always a span.
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_S:
            self._samples.popleft()
        first_time, first_tokens = self._samples[0]
        if now == first_time:
            return 0.0
        return (tokens - first_tokens) / (now - first_time)


def describe(played: Played, tokens_per_s: float) -> str:
    """Returns the line of a log that says how far a generation is."""
    text = f"{played.ended} of {played.episodes} episodes, {tokens_per_s:,.0f} tokens/s"
    if played.oldest_s:
        text += f", the slowest runs for {played.oldest_s:.0f} s"
    return text


def somebody_watches() -> bool:
    """Returns whether this is a notebook, or standard error a terminal that can redraw a line."""
    if "ipykernel" in sys.modules:
        return True
    # A process may have none.
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return is_terminal and os.environ.get("TERM") != "dumb"


@contextmanager
def printing_above(bar: tqdm) -> Iterator[None]:
    """Lets whole lines of print and of the log stand above a bar in the terminal, and closes it.

    In a notebook the bar is not part of the text, and nothing is done.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    stdout, stderr = sys.stdout, sys.stderr
    above_out = Above(stdout, bar)
    above_err = Above(stderr, bar)
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is stderr
    ]
    sys.stdout = above_out
    sys.stderr = above_err
    for handler in handlers:
        handler.setStream(above_err)
    try:
        yield
    finally:
        for handler in handlers:
            handler.setStream(stderr)
        # Somebody else may have put theirs there meanwhile.
        if sys.stdout is above_out:
            sys.stdout = stdout
        if sys.stderr is above_err:
            sys.stderr = stderr
        # Which would take the rest of a line away with it.
        bar.close()
        above_out.write_rest()
        above_err.write_rest()


class Above:
    """A stream of a terminal whose whole lines are written while the bar is out of the way."""

    def __init__(self, stream: TextIO, bar: tqdm) -> None:
        self._stream = stream
        self._bar = bar
        self._rest = ""

    def write(self, text: str) -> int:
        """Writes the lines that have become whole, and keeps what follows them."""
        with self._bar.get_lock():
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            if newline:
                self._bar.clear(nolock=True)
                self._stream.write(lines + newline)
                self._stream.flush()
                self._bar.refresh(nolock=True)
        return len(text)

    def write_rest(self) -> None:
        """Writes what is left of a line."""
        self._stream.write(self._rest)
        self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
