"""Tests that an environment in a thread does not end the run by what all threads share."""

from __future__ import annotations

import builtins
import io
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from custom.agent import AgentSpec
from data.process_globals import FUNCTIONS, mend_process_globals
from training.run.step_timer import StepTimer
from workers.environments.pool import EnvironmentPool

BREAKS = {
    "threading.excepthook": lambda: setattr(threading, "excepthook", None),
    "sys.excepthook": lambda: setattr(sys, "excepthook", None),
    "sys.unraisablehook": lambda: setattr(sys, "unraisablehook", "none"),
    "builtins.print": lambda: setattr(builtins, "print", None),
    "threading.excepthook deleted": lambda: delattr(threading, "excepthook"),
    "sys.stdout": lambda: setattr(sys, "stdout", None),
    "sys.stderr": lambda: setattr(sys, "stderr", None),
    "sys.stdout closed": lambda: sys.stdout.close(),
    "sys.stderr deleted": lambda: delattr(sys, "stderr"),
}


class Breaks:
    """Breaks one of them in `reset`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reset(self) -> str:
        BREAKS[self.name]()
        return "begin"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 0.0, True, {}


@contextmanager
def kept_globals() -> Iterator[None]:
    """Keeps what the block breaks; pytest's own streams are not there to be closed."""
    before = [(module, name, getattr(module, name)) for module, name, _ in FUNCTIONS]
    before += [(sys, name, getattr(sys, name)) for name in ("stdout", "stderr")]
    sys.stdout = io.StringIO()
    sys.stderr = io.StringIO()
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@pytest.mark.parametrize("name", BREAKS)
def test_what_ends_the_run_is_put_back_behind_the_call(name: str) -> None:
    spec = AgentSpec(Breaks, {"name": name})
    with kept_globals(), EnvironmentPool([spec], isolation="thread") as pool:
        pool.reset("a", 0, 1)
        assert pool.wait_for_reply().failure == ""
        thread = threading.Thread(target=print, args=("seen",))
        thread.start()
        thread.join()
        print("seen", file=sys.stderr)
        for module, attribute, _ in FUNCTIONS:
            assert callable(getattr(module, attribute))
        assert not sys.stdout.closed


def test_what_is_meant_stays() -> None:
    def hook(*arguments: Any) -> None:
        pass

    stream = io.StringIO()
    with kept_globals():
        threading.excepthook = hook
        sys.stdout = stream
        assert mend_process_globals() == []
        assert threading.excepthook is hook
        assert sys.stdout is stream


def test_warnings_that_code_made_errors_do_not_end_a_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("error", message="torch")
        with StepTimer()("save_checkpoint"):
            warnings.warn("torch warns", UserWarning, stacklevel=1)
        warnings.simplefilter("error")
        assert mend_process_globals() == ["warnings.filters"]
        assert mend_process_globals() == []
