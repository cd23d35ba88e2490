"""Gives the trainer each step's batch: generated when the step's turn comes, or ahead of it.

`OnDemandSource` generates in turn; `training/async_rollout/prefetch.py` has the source that works
ahead. Invariant: a source gives every step once, in order, with the data position behind the step's
rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.protocol import DataProto
from data.texts import text_of
from training.run.data_position import DataPosition, Rows, RowStream
from training.run.sampled_tokens import SampledTokens

logger = logging.getLogger(__name__)

Metrics = dict[str, float]
# (rows, step) -> the generated batch, and generation's metrics.
Generate = Callable[[Rows, int], tuple[DataProto, Metrics]]


@dataclass(frozen=True)
class GeneratedStep:
    """A step's batch before anything is trained on it.

    Attributes:
        batch: what generation gave.
        metrics: of generation.
        position: the data position behind the step's rows.
    """

    batch: DataProto
    metrics: Metrics
    position: DataPosition

    def result(self) -> GeneratedStep:
        """Returns itself: nothing is left to wait for."""
        return self


class PendingStep(Protocol):
    """A step to be made; a Future of a GeneratedStep is one, and so is a GeneratedStep."""

    def result(self) -> GeneratedStep:
        """Generates the step's batch, or waits for it."""
        ...


class StepSource(Protocol):
    """Gives the trainer its steps."""

    def next_step(self, step: int, last: int) -> PendingStep:
        """Returns the step of this number; `last` is the run's last one."""
        ...

    def mask_stale_groups(self, batch: DataProto, step: int) -> Metrics:
        """Masks groups that were sampled by too old weights; returns how old tokens are."""
        ...

    def wait_for_begun_steps(self) -> None:
        """Waits for what is being generated, where weights must not change in its midst."""
        ...

    def in_flight(self) -> tuple[Future[GeneratedStep], ...]:
        """Returns the steps that are generated, or being generated, ahead of their turn."""
        ...

    def restore(self, checkpoint: Path) -> None:
        """Takes over the steps in flight that a checkpoint holds."""
        ...

    def shutdown(self) -> None:
        """Begins nothing further."""
        ...


@dataclass(frozen=True)
class UngeneratedStep:
    """Holds the rows of a step that is generated when `result` is called."""

    rows: Rows
    step: int
    generate: Generate
    row_stream: RowStream

    def result(self) -> GeneratedStep:
        """Generates the step's batch."""
        batch, metrics = self.generate(self.rows, self.step)
        # Dynamic sampling has drawn further rows meanwhile.
        return GeneratedStep(batch, metrics, self.row_stream.position)


class OnDemandSource:
    """Generates each step when its turn comes, so that nothing is ever in flight or stale.

    Args:
        row_stream: where a step's rows are drawn from.
        generate: makes a step's batch of its rows.
    """

    def __init__(self, row_stream: RowStream, generate: Generate) -> None:
        self.row_stream = row_stream
        self.generate = generate

    def next_step(self, step: int, last: int) -> PendingStep:
        """Draws the step's rows."""
        return UngeneratedStep(self.row_stream.draw(step), step, self.generate, self.row_stream)

    def mask_stale_groups(self, batch: DataProto, step: int) -> Metrics:
        """Returns no metrics: the weights that sampled the batch are the latest."""
        return {}

    def wait_for_begun_steps(self) -> None:
        """Returns at once: no step has begun."""

    def in_flight(self) -> tuple[Future[GeneratedStep], ...]:
        """Returns none."""
        return ()

    def restore(self, checkpoint: Path) -> None:
        """Leaves out what a checkpoint has in flight: its rows are drawn again."""

    def shutdown(self) -> None:
        """Returns at once: there are no threads."""


@contextmanager
def first_cause_told(in_flight: Callable[[], Sequence[Future[GeneratedStep]]]) -> Iterator[None]:
    """Raises, where the block fails, what had failed before it in a step that is generated ahead.

    What trains then fails for want of what generates, and says nothing of why.

    Args:
        in_flight: returns the steps that have begun.
    """
    earlier: BaseException | None = None
    try:
        yield
    except Exception as error:
        earlier = _earlier_failure(in_flight())
        if earlier is None or earlier is error:
            raise
        later = f"{type(error).__name__}: {text_of(error)}".splitlines()[0]
        earlier.add_note(f"it came first, in a step that was generated ahead; then came {later}")
    if earlier is not None:
        raise earlier


def _earlier_failure(steps: Sequence[Future[GeneratedStep]]) -> BaseException | None:
    """Returns what the first of the steps that have failed has failed of; None: none has."""
    for step in steps:
        if step.done() and not step.cancelled() and step.exception() is not None:
            return step.exception()
    return None


def warn_if_nothing_to_train(step: int, total_steps: int, tokens: SampledTokens) -> None:
    """Logs that a run is at its last step already, or has sampled all its tokens, where it has."""
    if tokens.are_enough:
        logger.warning(
            "nothing to train: the run has sampled %d tokens in %d steps, and "
            "trainer.total_sampled_tokens=%d; a larger number extends it, "
            "trainer.resume_mode=disable starts it anew",
            tokens.so_far,
            step,
            tokens.limit,
        )
    elif step >= total_steps:
        logger.warning(
            "nothing to train: the run is at step %d of %d; trainer.total_training_steps or "
            "total_epochs extends it, trainer.resume_mode=disable starts it anew",
            step,
            total_steps,
        )
