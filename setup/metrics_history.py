"""An epoch's entry of `metrics_history`, made of the metrics of its steps.

Invariant: an entry's numbers are means over the epoch's steps; docs/python.md has its keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

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


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns each metric's mean over those steps that have it."""
    values: dict[str, list[float]] = {}
    for metrics in steps:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}
