"""The metrics of an update, kept as tensors until its end.

Invariant: nothing is read before `MetricSums.read`, where one synchronisation reads all of it, over
all ranks.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from workers.ranks.process_groups import max_over_ranks, sum_over_ranks

# Metrics of a step, and sections of them, which the trainer and its features write: a loss's own
# metrics take no name of these.
STEP_METRICS = (
    "step",
    "actor/pg_loss",
    "actor/entropy",
    "actor/old_entropy",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "actor/reward_kl_penalty_coeff",
    "actor/observation_loss",
    "actor/grad_norm",
    "actor/skipped_updates",
    "actor/lr",
)
STEP_SECTIONS = (
    "agent/",
    "alarms/",
    "async/",
    "canary/",
    "critic/",
    "env/",
    "filter_groups/",
    "groups/",
    "perf/",
    "prompt_length/",
    "response/",
    "response_length/",
    "timing_per_token_ms/",
    "timing_s/",
    "tool/",
    "tool_failures/",
    "training/",
    "val-aux/",
    "val-core/",
)


class StepNames:
    """Knows which names of metrics are the step's."""

    def __contains__(self, name: object) -> bool:
        """Tells whether a metric of this name is the step's own."""
        return name in STEP_METRICS or str(name).startswith(STEP_SECTIONS)


class MetricSums:
    """Adds up metrics as detached tensors.

    What is added is this rank's share of a mean over all ranks' tokens: `read` sums the shares, and
    takes the largest maximum. Ranks of one sequence-parallel group add the same share, which counts
    once.

    Attributes:
        mini_batches, steps: how many mini-batches have added metrics, and how many optimiser steps.
    """

    def __init__(self, sequence_ranks: int = 1) -> None:
        self.sequence_ranks = sequence_ranks
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.mini_batches = 0
        self.steps = 0

    def copy(self) -> Self:
        """Copies what has been added so far; its tensors are never written to."""
        copied = type(self)(self.sequence_ranks)
        copied.sums = dict(self.sums)
        copied.maxima = dict(self.maxima)
        copied.mini_batches = self.mini_batches
        copied.steps = self.steps
        return copied

    def add(self, metrics: Mapping[str, Any], weight: float = 1.0) -> None:
        """Adds shares of means."""
        for name, value in metrics.items():
            share = torch.as_tensor(value).detach().float().mean() * weight
            if name in self.sums:
                share = self.sums[name] + share
            self.sums[name] = share

    def maximum(self, metrics: Mapping[str, Tensor]) -> None:
        """Takes maxima in."""
        for name, value in metrics.items():
            largest = torch.maximum(self.maxima.get(name, value), value)
            self.maxima[name] = largest.detach().float()

    def divide(self, divisor: float, others: Mapping[str, float]) -> None:
        """Divides every sum by `divisor`, those that `others` names by the number there."""
        self.sums = {name: value / others.get(name, divisor) for name, value in self.sums.items()}

    def all_finite(self) -> bool:
        """Checks whether every sum of this rank is finite; the host waits for it."""
        return bool(_stack(self.sums).isfinite().all())

    def read(self) -> dict[str, float]:
        """Returns all metrics, over all ranks; a collective."""
        sums = sum_over_ranks(_stack(self.sums)) / self.sequence_ranks
        maxima = max_over_ranks(_stack(self.maxima))
        metrics = dict(zip(self.sums, sums.tolist(), strict=True))
        metrics.update(zip(self.maxima, maxima.tolist(), strict=True))
        return metrics


def _stack(values: Mapping[str, Tensor]) -> Tensor:
    if not values:
        return torch.zeros(0)
    return torch.stack([value.cpu() for value in values.values()])
