"""Rewrites a run's page while the run goes on.

Invariant: between the page of the start and that of the end it is written at most every
`LEAST_PAUSE_S`, and writing takes at most `LARGEST_SHARE` of the time: what it cost so far, and
what it would cost now, decide. A page that cannot be written costs itself, not the run.
"""

import logging
import time
from collections.abc import Callable

from features.run_page.content import make_content
from features.run_page.html import write_html
from features.run_page.run_folder import RunFolder

logger = logging.getLogger(__name__)

PAGE = "report.html"
LEAST_PAUSE_S = 30.0
LARGEST_SHARE = 0.01


class PageSchedule:
    """Decides when the page may be written again.

    Args:
        clock: seconds that pass, from any beginning.

    Attributes:
        spent: seconds that writing has taken.
        last_cost: seconds that it took the last time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._last_end = self._began
        self.spent = 0.0
        self.last_cost = 0.0

    def is_due(self) -> bool:
        """Checks whether there is time for the page."""
        now = self._clock()
        allowed = LARGEST_SHARE * (now - self._began)
        return now - self._last_end >= LEAST_PAUSE_S and self.spent + self.last_cost <= allowed

    def pause(self) -> float:
        """Estimates the seconds from one page to the next."""
        return max(LEAST_PAUSE_S, self.last_cost / LARGEST_SHARE)

    def took(self, seconds: float) -> None:
        """Is told what writing the page took."""
        self.spent += seconds
        self.last_cost = seconds
        self._last_end = self._clock()


class PageWriter:
    """Writes a run's page.

    Args:
        folder: the run's, as it stood when this process began; its owner adds what happens.

    Attributes:
        has_failed: a page could not be written, which was logged.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.schedule = PageSchedule()
        self.has_failed = False

    def write_if_due(self) -> None:
        """Writes the page where there is time for it."""
        if self.schedule.is_due():
            self.write()

    def write(self) -> None:
        """Writes the page; what goes wrong is logged, once."""
        page = self.folder.path / PAGE
        began = time.perf_counter()
        try:
            pause = self.schedule.pause()
            content = make_content([self.folder], page, rewritten_every=pause)
            write_html(content, page)
        # Whatever a metric, an event or the disk does to it.
        except Exception as error:
            if not self.has_failed:
                logger.warning(
                    "%s is not written, the run goes on without: %s: %s",
                    page,
                    type(error).__name__,
                    error,
                )
            self.has_failed = True
        self.schedule.took(time.perf_counter() - began)
