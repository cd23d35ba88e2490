"""What a feature adds to the rows of a step before the policy's update: `StepAddition`.

    ... advantages -> resample -> additions -> updates

An addition is given the rows that the updates are to learn from, scores and advantages among them,
and returns them with further fields, or other advantages; it may ask companions on the ranks
(workers/model/companion.py). Fields reach the loss where a term of the loss names them
(workers/model/loss_terms.py). What it raises ends the run. Invariant: the step's own batch stays as
the estimator left it, for records, alarms and metrics; without additions the rows are the same
object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from data.loading import load_object
from data.protocol import DataProto
from training.config import PPOConfig
from training.features import named
from training.run.worker_group_protocol import PolicyGroup
from workers.model.companion import ASKED

Metrics = dict[str, float]


class StepAddition(ABC):
    """Adds to the rows that a step's updates learn from.

    Attributes:
        name: of its time in the step's metrics, `timing_s/NAME`.
    """

    name: str

    @abstractmethod
    def add(self, rows: DataProto, policy: PolicyGroup) -> tuple[DataProto, Metrics]:
        """Returns the rows with what it adds, in a copy, and metrics.

        Args:
            rows: as arranged for the ranks; dummy rows are among them.
            policy: the policy's ranks, whose companions `ask` asks.
        """


def ask(policy: PolicyGroup, companion: str, rows: DataProto) -> DataProto:
    """Returns what the companion of this name says of rows, which are spread over the ranks."""
    return policy.ask_companion(replace(rows, meta_info=rows.meta_info | {ASKED: companion}))


def open_step_additions(config: PPOConfig, tokenizer: Any) -> list[StepAddition]:
    """Opens what features bring (`Feature.step_addition`) and the config asks for."""
    opened = []
    for feature, place in named("step_addition"):
        addition = load_object(place, f"feature {feature}")(config, tokenizer)
        if addition is not None:
            opened.append(addition)
    return opened


def add_all(
    additions: Sequence[StepAddition],
    rows: DataProto,
    policy: PolicyGroup,
    timer: Callable[[str], AbstractContextManager[None]],
) -> tuple[DataProto, Metrics]:
    """Has each addition add to the rows, in order; returns them and all metrics."""
    metrics: Metrics = {}
    for addition in additions:
        with timer(addition.name):
            rows, own = addition.add(rows, policy)
        metrics |= own
    return rows, metrics
