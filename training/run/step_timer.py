"""Measures the sections of a step, and shows the watchdog where the run is."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from data.watchdog import WATCHDOG, beat


class StepTimer:
    """Measures seconds per named section of a step: `with timer("gen"): ...`.

    A section that comes twice adds up. The watchdog takes it for the place where the run is, and
    an error leaves it so.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        outer = WATCHDOG.place
        WATCHDOG.place = name
        beat(f"{name} began")
        yield
        WATCHDOG.place = outer
        elapsed = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
