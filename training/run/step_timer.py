"""Measures the sections of a step, and shows the watchdog where the run is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from data.own_process import one_process
from data.process_globals import drop_error_filters
from data.warn_once import warn_first
from data.watchdog import WATCHDOG, beat


class StepTimer:
    """Measures seconds per named section of a step: `with timer("gen"): ...`.

    A section that comes twice adds up. The watchdog takes it for the place where the run is, and
    an error leaves it so. A child that code in a section forked ends where the section does.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        outer = WATCHDOG.place
        WATCHDOG.place = name
        beat(f"{name} began")
        if drop_error_filters():
            warn_first(
                __name__,
                "warnings.filters",
                'code of yours has set warnings.simplefilter("error"), or the like, for the whole '
                "process: it is taken back, as what torch warns of would end the run; use "
                "warnings.catch_warnings() around your own lines",
            )
        with one_process(f"code that ran in the step's {name!r}"):
            yield
        WATCHDOG.place = outer
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
