"""The probes of a rank: told what happens, switched off where one raises, read over all ranks.

Invariant: the ranks hold the same probes at the end of every call that reads them, so that no
collective of theirs waits for a rank which has lost a probe.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.model.loss_fields import LossFields
from workers.model.probe import (
    GroupCounts,
    LossOf,
    Measured,
    MicroBatch,
    MiniBatch,
    Probe,
    ReadProbe,
    StepOutcome,
    SyncProbe,
    TrainedModel,
    UpdateProbe,
    contained,
)
from workers.ranks.process_groups import max_over_ranks, rank, sum_over_ranks, world_size

logger = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=Probe)
# The fault of a probe that raised on other ranks alone.
OFF = "it is off on every rank"
Metrics = dict[str, float]


class ProbeSet(Generic[Kind]):
    """Holds probes of one kind.

    Args:
        probes: the same ones on every rank.

    Raises:
        ValueError: two of them have one name.
    """

    def __init__(self, probes: Sequence[Kind] = ()) -> None:
        names = [probe.name for probe in probes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                f"two probes are called {', '.join(twice)}: a record is found by the name of its "
                "probe, so give each class a `name` of its own"
            )
        self.probes = list(probes)

    def working(self) -> Iterator[Kind]:
        """Yields those that have not raised on this rank."""
        for probe in self.probes:
            if probe.fault is None:
                yield probe

    def _read(
        self, measured: Mapping[str, Measured], sequence_ranks: int = 1
    ) -> dict[str, Metrics]:
        """Puts what every rank measured together, by probe; a collective.

        Probes that raised, on whichever rank, are left out from here on.

        Args:
            measured: by probe, on this rank.
            sequence_ranks: ranks that have the same share of a sum.
        """
        for probe in self.working():
            with contained(probe):
                _require_scalars(measured[probe.name])
        self._drop_faulty(measured)
        kept = [(probe.name, measured[probe.name]) for probe in self.probes]
        sums = sum_over_ranks(_stack([each.sums for _, each in kept])) / sequence_ranks
        maxima = max_over_ranks(_stack([each.maxima for _, each in kept]))
        sums_left = iter(sums.tolist())
        maxima_left = iter(maxima.tolist())
        totals = {}
        for name, each in kept:
            totals[name] = {metric: next(sums_left) for metric in each.sums}
            totals[name].update((metric, next(maxima_left)) for metric in each.maxima)
        return totals

    def _metrics(self, totals: Mapping[str, Metrics], taken: Metrics | None = None) -> Metrics:
        """Lets each probe make its metrics of what all ranks measured.

        Args:
            taken: metrics that there are, whose names no probe may use.
        """
        there = dict(taken or {})
        metrics: Metrics = {}
        for probe in self.working():
            if probe.name in totals:
                with contained(probe):
                    own = _new_metrics(probe.metrics_of(totals[probe.name]), there | metrics)
                    metrics.update(own)
        return metrics

    def _drop_faulty(self, measured: Mapping[str, Measured] | None = None) -> None:
        """Takes those out that raised on any rank, or that name other metrics there; a collective.

        The first rank says so.
        """
        if not self.probes:
            return
        checks = []
        for probe in self.probes:
            names = 0
            if probe.fault is None and measured is not None and probe.name in measured:
                names = _checksum(measured[probe.name])
            checks.append([float(probe.fault is not None), float(names), -float(names)])
        worst = max_over_ranks(torch.tensor(checks, dtype=torch.float64)).tolist()
        kept = []
        lost = []
        for probe, (failed, largest, negated_smallest) in zip(self.probes, worst, strict=True):
            if not failed and largest == -negated_smallest:
                kept.append(probe)
            else:
                lost.append(probe)
        self.probes = kept
        for probe in lost:
            _tell_loss(probe)


class UpdateProbes(ProbeSet[UpdateProbe]):
    """Tells its probes of an update what `UpdateProbe` lists."""

    def __init__(self, probes: Sequence[UpdateProbe] = ()) -> None:
        super().__init__(probes)
        self._records: dict[str, Any] = {}

    def fields(self) -> tuple[str, ...]:
        """Lists the fields of a batch that probes need, each once."""
        return tuple(dict.fromkeys(name for probe in self.probes for name in probe.fields))

    def loaded(self, model: TrainedModel) -> None:
        """Shows the model."""
        for probe in self.working():
            with contained(probe):
                probe.loaded(model)

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Begins a mini-batch, maybe once more."""
        for probe in self.working():
            with contained(probe):
                probe.begin(model, mini)

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Shows a micro-batch."""
        for probe in self.working():
            with contained(probe):
                probe.before_backward(micro, fields, outputs, loss)

    def divide(self, by: GroupCounts) -> None:
        """Has sums divided by the counts of all groups."""
        for probe in self.working():
            with contained(probe):
                probe.divide(by)

    def before_step(self, model: TrainedModel, mini: MiniBatch, loss_of: LossOf) -> None:
        """Shows the whole gradient."""
        for probe in self.working():
            with contained(probe):
                probe.before_step(model, mini, loss_of)

    def after_step(self, model: TrainedModel, outcome: StepOutcome) -> None:
        """Shows the model behind its step."""
        for probe in self.working():
            with contained(probe):
                probe.after_step(model, outcome)

    def take(self, sequence_ranks: int, taken: Metrics | None = None) -> Metrics:
        """Returns the update's metrics over all ranks, and keeps the records; a collective.

        Args:
            taken: the update's own metrics, whose names no probe may use.
        """
        measured = {}
        for probe in self.working():
            with contained(probe):
                measured[probe.name] = probe.take()
        metrics = self._metrics(self._read(measured, sequence_ranks), taken)
        self._records = {}
        for probe in self.working():
            if measured[probe.name].record is not None:
                self._records[probe.name] = measured[probe.name].record
        return metrics

    def take_records(self) -> dict[str, Any]:
        """Returns this rank's records of the last update, by probe, once."""
        records = self._records
        self._records = {}
        return records


class ReadProbes(ProbeSet[ReadProbe]):
    """Tells its probes of a model that is only read."""

    def read(self, module: nn.Module) -> Metrics:
        """Shows the model; returns metrics over all ranks; a collective."""
        measured = {}
        for probe in self.working():
            with contained(probe):
                measured[probe.name] = probe.read(module)
        return self._metrics(self._read(measured))


class SyncProbes(ProbeSet[SyncProbe]):
    """Tells its probes of weight syncs, on the ranks of the policy, of engines, or of both."""

    def weights_sent(self, actor: Any) -> dict[str, Tensor]:
        """Shows the policy; returns what is to be compared, by probe; a collective."""
        sent = {}
        for probe in self.working():
            with contained(probe):
                value = probe.weights_sent(actor)
                if value is not None:
                    sent[probe.name] = value
        self._drop_faulty()
        kept = {probe.name for probe in self.probes}
        return {name: value for name, value in sent.items() if name in kept}

    def weights_taken(self, engine: Any, sent: Mapping[str, Tensor]) -> Metrics:
        """Shows the engine; returns metrics over all of its ranks; a collective."""
        measured = {}
        for probe in self.working():
            measured[probe.name] = Measured()
            if probe.name in sent:
                with contained(probe):
                    measured[probe.name] = probe.weights_taken(engine, sent[probe.name])
        return self._metrics(self._read(measured))


def _require_scalars(measured: Any) -> None:
    """Requires what a probe measured to be 0-dim tensors by name.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(measured, Measured):
        raise TypeError(f"it returned {measured!r}, which is no Measured")
    for part in (measured.sums, measured.maxima):
        for name, value in part.items():
            if not isinstance(name, str):
                raise TypeError(f"it named a metric {name!r}, which is no text")
            if not isinstance(value, Tensor) or value.dim() > 0:
                raise TypeError(f"it measured {name}={value!r}, which is no 0-dim tensor")


def _new_metrics(own: Mapping[str, float], there: Metrics) -> Metrics:
    """Returns a probe's metrics as numbers.

    Raises:
        ValueError: there is one of them already, which a probe must not change.
    """
    taken = [name for name in own if name in there]
    if taken:
        raise ValueError(
            f"it measured {', '.join(taken)}, which there is already: take names of its own"
        )
    return {name: float(value) for name, value in own.items()}


def _checksum(measured: Measured) -> int:
    """Returns a number that stands for the names of what was measured."""
    return zlib.crc32(str([[*measured.sums], [*measured.maxima]]).encode())


def _stack(parts: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Stacks 0-dim tensors: (tensors,) float32, on the CPU."""
    values = [value.detach().float().cpu() for part in parts for value in part.values()]
    if not values:
        return torch.zeros(0)
    return torch.stack(values)


def _tell_loss(probe: Probe) -> None:
    """Warns of a probe that is off from here on, on the first rank; a collective."""
    fault = first_fault(probe.fault) or "its ranks measured different metrics"
    # Its hooks may still be there.
    probe.fault = probe.fault or OFF
    if rank() == 0:
        logger.warning(
            "probe %s is switched off for the rest of the run, and what it measures is missing: %s",
            probe.name,
            fault,
        )


def first_fault(fault: str | None) -> str | None:
    """Returns the first rank's fault that has one; a collective."""
    if world_size() == 1:
        return fault
    faults: list[str | None] = [None] * world_size()
    dist.all_gather_object(faults, fault)
    return next((each for each in faults if each is not None), None)
