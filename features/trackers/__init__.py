"""Sends a run's metrics, and validation's answers, to where people look at them.

A tracker is a file here, and `observer` hands a run's steps to all of them. What needs only this
process and the run's folder (json, file, tensorboard) is called from it; what belongs to a package
with threads, processes and a network of its own (wandb, mlflow, swanlab, trackio, clearml) lives in
a process of its own (`process.py`, `child.py`), which may hang or die without the run.

Invariant: what is imported here needs no package, as a tracker's process may have another Python.
"""

import importlib
from typing import Any

# Names of this package -> the module that has them.
NAMES = {
    "FileTracker": "features.trackers.file",
    "Tracker": "features.trackers.interface",
    "Tracking": "features.trackers.base",
    "cut_back": "training.run.metrics_file",
    "read_records": "training.run.metrics_file",
}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use: a config asks for the settings alone."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)


def __dir__() -> list[str]:
    """Lists the names that the package offers, beside those that are there."""
    return [*globals(), *NAMES]
