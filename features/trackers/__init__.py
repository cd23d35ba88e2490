"""Sends a run's metrics, and validation's answers, to where people look at them.

A tracker is a file here. A tracker that needs only this process and the run's folder (console,
json, file, tensorboard) is called from it; a package with threads, processes and a network
of its own (wandb, mlflow, swanlab, trackio, clearml) lives in a process of its own (`process.py`,
`child.py`), which may hang or die without the run.

Invariant: what is imported here needs no package, as a tracker's process may have another Python.
"""

from features.trackers.base import Tracking, open_trackers
from features.trackers.console import (
    ConsoleTracker,
    format_line,
    format_validation,
)
from features.trackers.file import FileTracker, cut_back, read_records
from features.trackers.interface import Generations, Tracker

__all__ = [
    "ConsoleTracker",
    "FileTracker",
    "Generations",
    "Tracker",
    "Tracking",
    "cut_back",
    "format_line",
    "format_validation",
    "open_trackers",
    "read_records",
]
