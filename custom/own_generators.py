"""Global random generators, kept apart for each environment that draws from them.

Games that call `random.random()` or `np.random.rand()` share one state with everything else in the
process. Invariant: inside `OwnGenerators.installed` such a game draws from a state of its own, and
nobody else's draws change, also after an exception.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

# Reentrant, because an environment that has its generators installed may step another one.
_INSTALLED = threading.RLock()


class OwnGenerators:
    """Keeps the states of Python's and numpy's global generators for one environment, seeded.

    with generators.installed():
        ...  # draws from `random` and `np.random` where it left off the last time

    One thread at a time has its own installed, and the others wait for it: otherwise equal seeds
    would not give equal tasks. So a call that hangs in there holds all others up; in a process of
    its own it holds up nobody.
    """

    def __init__(self, seed: int) -> None:
        self._python_state = random.Random(seed).getstate()
        self._numpy_state = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs these states, and puts the others' back at the end, also after an exception."""
        with _INSTALLED:
            others_python_state = random.getstate()
            others_numpy_state = np.random.get_state()
            random.setstate(self._python_state)
            np.random.set_state(self._numpy_state)
            try:
                yield
            finally:
                self._python_state = random.getstate()
                self._numpy_state = np.random.get_state()
                random.setstate(others_python_state)
                np.random.set_state(others_numpy_state)
