"""An epoch's entry of `metrics_history`, made of the metrics of its steps.

Invariant: an entry's numbers are means over the epoch's steps; docs/python.md has its keys.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.run.metrics_file import METRICS_FILE, read_records

# The trainer's metrics that an entry shows under names of its own.
HISTORY = {
    "policy_loss": "actor/pg_loss",
    "value_loss": "critic/vf_loss",
    "entropy": "actor/entropy",
    "kl": "actor/ppo_kl",
    "clip_fraction": "actor/pg_clipfrac",
    "reward": "critic/score/mean",
    "response_length": "response_length/mean",
    "learning_rate": "actor/lr",
    "seconds": "timing_s/step",
}


def epoch_entry(epoch: int, steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns the entry of an epoch with these steps' metrics; None for what no step has."""
    means = mean_over_steps(steps)
    entry: dict[str, Any] = {"epoch": epoch, "iterations": len(steps)}
    for name, metric in HISTORY.items():
        entry[name] = means.get(metric)
    entry["all"] = means
    return entry


def recorded_steps(run_dir: Path, last: int) -> list[dict[str, float]]:
    """Reads the metrics of a run's steps from 1 to `last`, in order; none where one is missing."""
    file = run_dir / METRICS_FILE
    if not last or not file.is_file():
        return []
    by_step: dict[int, dict[str, float]] = {}
    for record in read_records(file):
        # The entry of a validation before the first step has no step's metrics.
        if "training/global_step" in record:
            metrics = {name: float(value) for name, value in record.items() if name != "step"}
            by_step[int(record["step"])] = metrics
    if any(step not in by_step for step in range(1, last + 1)):
        return []
    return [by_step[step] for step in range(1, last + 1)]


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each metric's mean over those steps that have it."""
    values: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
