"""What an update, a read model and a weight sync tell those who measure: probes.

A probe measures and changes nothing: with all probes off, weights are bitwise what they are with
them. The core knows none by name; workers/model/probes_of_run.py opens those of a run. An update
calls, on every rank:

    loaded                                             once
    begin -> before_backward, before_backward, ...     of each mini-batch; `begin` comes once more,
          -> before_step -> after_step                 where the device ran out of memory
    take                                               behind the last mini-batch

With `trainer.train_finished_groups` the groups of the one mini-batch come one by one: `begin` with
the first, `divide` before `before_step`.

A probe that raises costs itself and not the run: all ranks switch it off together, and the first
one says so once. Out of memory and Ctrl-C pass through. So that no rank waits for another, a probe
makes no collective of its own: it returns shares and maxima (`Measured`), which the core puts
together over all ranks. In place of an autograd hook it registers `self.guarded(hook)`.

Invariant: whatever a method is given is read, and never changed.
"""

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from data.protocol import DataProto
from training.core_algos import GlobalBatchInfo
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_fields import LossFields
from workers.model.packing import ForwardBatch
from workers.model.update_metrics import MetricSums

# Where this environment variable is `raise`, a probe's fault ends the run, as in our tests.
FAULTS = "PROBE_FAULTS"
# What a probe does not keep to itself.
PASSED_ON = (KeyboardInterrupt, GeneratorExit, MemoryError, torch.OutOfMemoryError)

# Loss of a micro-batch in its layout, its part of the mini-batch's, with a gradient.
LossOf = Callable[[DataProto, ForwardBatch], Tensor]
# What became of an optimiser step; one whose gradient is not finite is skipped.
StepOutcome = Literal["made", "not_finite", "nothing_to_learn"]


@dataclass(frozen=True)
class TrainedModel:
    """Holds the model that an update trains.

    Attributes:
        name: "actor" or "critic", which its metrics begin with.
        module: what trains, as it is saved; sharded where there are several ranks.
        optimizer: of its parameters.
        settings: how it is run.
    """

    name: str
    module: nn.Module
    optimizer: Optimizer
    settings: ForwardSettings


@dataclass(frozen=True)
class MiniBatch:
    """Holds this rank's part of a mini-batch.

    Attributes:
        counts: of all ranks, which sums are divided by; of groups that come one by one ones, see
            `UpdateProbe.divide`.
        rows: None where groups come one by one.
        number: of the update, from 0 on in each step.
        updates: mini-batches of the step, over all epochs.
        in_last_epoch: whether it is one of the last epoch's.
    """

    counts: GlobalBatchInfo
    rows: DataProto | None = None
    number: int = 0
    updates: int = 1
    in_last_epoch: bool = True

    @property
    def weight(self) -> float:
        """Returns its share of the step's means."""
        return 1 / self.updates


@dataclass(frozen=True)
class MicroBatch:
    """Holds the rows of a micro-batch.

    Attributes:
        rows: on the CPU, with all fields that the rank was sent.
        places: (rows,) their numbers in the mini-batch; empty where they only pad.
        layout: how the rows lie in the pass; None: they went through none.
    """

    rows: DataProto
    places: Tensor
    layout: ForwardBatch | None = None


@dataclass(frozen=True)
class GroupCounts:
    """Holds the counts of all groups of an update, by which its sums are divided in the end.

    Attributes:
        tokens: sampled tokens, for means over them.
        loss: what the loss's aggregation divides by; gradients have been divided by it.
    """

    tokens: float
    loss: float


@dataclass(frozen=True)
class Measured:
    """Holds what a probe measured on this rank; every rank names the same metrics.

    Attributes:
        sums: shares, 0-dim each, that are summed over the ranks (those of a sequence-parallel
            group have the same share, which counts once).
        maxima: 0-dim each, of which the largest of any rank counts.
        record: this rank's own, for whoever asks by the probe's name; None: there is none.
    """

    sums: Mapping[str, Tensor] = field(default_factory=dict)
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    record: Any = None


class Probe:
    """What the three kinds of probes share.

    Attributes:
        name: of its record, and of itself in messages; by default the class's.
        fault: the traceback of what it raised; the run then goes on without it.
    """

    name: str = ""
    fault: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Makes metrics of the sums and maxima over all ranks; by default they are metrics."""
        return totals

    def guarded(self, hook: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Makes an autograd hook that costs the probe, and not the backward pass, if it raises."""

        def run(gradient: Tensor) -> None:
            if self.fault is None:
                with contained(self):
                    hook(gradient)

        return run


class UpdateProbe(Probe):
    """Measures updates of policy or critic; every method may be left out.

    Attributes:
        fields: of the batch that it needs in micro-batches, beside those that losses read.
    """

    fields: tuple[str, ...] = ()

    def loaded(self, model: TrainedModel) -> None:
        """Sees the model once it is loaded, before anything trains."""

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Begins a mini-batch, whose gradients are zero.

        Once more where memory ran out in its midst: it then forgets what it saw of it.
        """

    def before_backward(
        self, micro: MicroBatch, fields: LossFields, outputs: Mapping[str, Tensor], loss: Tensor
    ) -> None:
        """Sees a micro-batch whose backward pass is to come.

        Args:
            fields: what the loss read, (rows, response_len) or (rows,), on the device. Where the
                batch has no `old_log_probs`, those of the policy itself stand there.
            outputs: `log_prob` and `entropy`, `values`: (rows, response_len) each, as far as the
                model has them, with their gradient. Kept behind the backward pass, they keep its
                memory.
            loss: 0-dim, the micro-batch's part of the mini-batch's.
        """

    def divide(self, by: GroupCounts) -> None:
        """Divides sums that had no counts yet, as groups came one by one."""

    def before_step(self, model: TrainedModel, mini: MiniBatch, loss_of: LossOf) -> None:
        """Sees the whole gradient of a mini-batch, before it is clipped.

        `loss_of` runs a micro-batch once more, with a gradient: a collective on several ranks. Take
        gradients of it by `torch.autograd.grad`, as `backward` would add to those of the update.
        """

    def after_step(self, model: TrainedModel, outcome: StepOutcome) -> None:
        """Sees the model behind the optimiser's step."""

    def take(self) -> Measured:
        """Returns what it measured since the first `begin` of this update."""
        return Measured()


class SummingProbe(UpdateProbe):
    """A probe whose sums and maxima are there for the taking, in `self.sums`.

    They begin anew with each update, and go back to what they were where a mini-batch begins anew.

    Attributes:
        model: of the update.
        mini: the mini-batch that is under way, without its rows.
    """

    model: TrainedModel
    mini: MiniBatch

    def __init__(self) -> None:
        self.sums = MetricSums()
        self._before = MetricSums()
        self._mini_batch = -1

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Takes back what a mini-batch that begins anew has added."""
        self.model = model
        self.mini = replace(mini, rows=None)
        if mini.number == 0:
            self._before = MetricSums()
        elif mini.number != self._mini_batch:
            self._before = self.sums.copy()
        self._mini_batch = mini.number
        self.sums = self._before.copy()

    def take(self) -> Measured:
        """Returns the sums and maxima, and forgets them."""
        measured = self.sums
        self.sums = MetricSums()
        return Measured(sums=measured.sums, maxima=measured.maxima)


class ReadProbe(Probe):
    """Measures a model that is only read, such as the reference."""

    def read(self, module: nn.Module) -> Measured:
        """Sees the model once it is loaded, and behind every pass over a batch."""
        return Measured()


class SyncProbe(Probe):
    """Measures weight syncs: policy and engine may be on other ranks, with a probe each."""

    def weights_sent(self, actor: Any) -> Tensor | None:
        """Sees the policy (`DataParallelPPOActor`) whose weights were sent.

        Returns: what `weights_taken` is to compare with, on the CPU; None: nothing this time.
        """
        return None

    def weights_taken(self, engine: Any, sent: Tensor) -> Measured:
        """Sees the engine (`BaseRollout`) that has the weights, and what `weights_sent` gave."""
        return Measured()


@contextmanager
def contained(probe: Probe) -> Iterator[None]:
    """Keeps what a probe raises in the block as its fault; Ctrl-C and out of memory are not."""
    try:
        yield
    except PASSED_ON:
        raise
    # Also what is no Exception, such as sys.exit().
    except BaseException as error:
        if raises_faults():
            raise
        # As text: the traceback itself would keep the tensors of its frames.
        probe.fault = "".join(traceback.format_exception(error)).strip()


def raises_faults() -> bool:
    """Checks whether a probe's fault is to end the run."""
    return os.environ.get(FAULTS) == "raise"
