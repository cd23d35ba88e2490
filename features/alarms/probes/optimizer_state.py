"""Whether an optimiser's state is what its last step left: some of its numbers, compared exactly.

Between two updates nothing changes it. Where it is emptied, or belongs to other parameters, a run
goes on all the same and learns as if its first steps were never made. Nothing is known of what an
optimiser keeps: whatever tensors it has for a parameter are compared. Invariant: a state is read
and never written.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from features.alarms.probes.movement import shards_of, trained_tensors
from workers.model.probe import Measured, MiniBatch, TrainedModel, UpdateProbe

# Numbers of a tensor that are compared.
SAMPLED = 256

# Each parameter with a state has (numbers,) float64 on the CPU.
States = dict[str, Tensor]


class OptimizerState(UpdateProbe):
    """Counts MODEL/optimizer_state_changed: parameters whose state is not what an update left."""

    def __init__(self) -> None:
        self._model: TrainedModel | None = None
        self._shards: dict[str, Tensor] = {}
        self._left: States = {}
        self._changed = 0

    def loaded(self, model: TrainedModel) -> None:
        """Notes the shards of a model that is spread over ranks."""
        self._shards = shards_of(dict(model.module.named_parameters()))

    def begin(self, model: TrainedModel, mini: MiniBatch) -> None:
        """Compares the state with that behind the update before."""
        self._model = model
        if mini.number > 0:
            return
        now = self._read(model)
        self._changed = 0
        for name, numbers in self._left.items():
            is_same = name in now and torch.equal(now[name], numbers)
            self._changed += not is_same

    def _read(self, model: TrainedModel) -> States:
        """Reads the states of the parameters that every batch reaches."""
        # Where a forward pass leaves its parameters gathered, the optimiser's are the shards.
        parameters = dict(model.module.named_parameters()) | self._shards
        names = trained_tensors(model.module)
        return sample_states(model.optimizer, {name: parameters[name] for name in names})

    def take(self) -> Measured:
        """Keeps the state that the update leaves."""
        if self._model is None:
            return Measured()
        self._left = self._read(self._model)
        return Measured(maxima={"optimizer_state_changed": torch.tensor(float(self._changed))})

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Names the count by the model."""
        if self._model is None:
            return {}
        prefix = self._model.name
        return {f"{prefix}/{name}": value for name, value in totals.items()}


def sample_states(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> States:
    """Copies some numbers of each parameter's state; one without a state is left out."""
    sampled: States = {}
    for name, parameter in parameters.items():
        state = optimizer.state.get(parameter, {})
        kept = [state[key] for key in sorted(state) if isinstance(state[key], Tensor)]
        if kept:
            sampled[name] = torch.cat([_sampled(tensor, parameter) for tensor in kept])
    if not sampled:
        return {}
    # One copy to the CPU, as each waits for the device.
    numbers = torch.cat(list(sampled.values())).cpu()
    sizes = [len(each) for each in sampled.values()]
    return dict(zip(sampled, numbers.split(sizes), strict=True))


def _sampled(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Picks numbers of this rank's part of a tensor: (at most about SAMPLED,) float64."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    flat = tensor.detach().reshape(-1)
    stride = max(len(flat) // SAMPLED, 1)
    # Counts of steps may lie on the CPU; NaN is equal to itself here.
    return flat[::stride].to(parameter.device, torch.float64).nan_to_num()
