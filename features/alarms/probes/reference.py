"""Whether the reference is still the model that was loaded."""

from torch import Tensor, nn

from features.alarms.probes.movement import Numbers, read_flags, sample_numbers, shards_of
from workers.model.lora import base_name
from workers.model.probe import Measured, ReadProbe


class ReferenceMovement(ReadProbe):
    """Counts `ref_tensors_moved`: tensors in which a sampled number is not what it was."""

    def __init__(self) -> None:
        # The model's numbers as it was loaded.
        self._first: Numbers | None = None
        self._shards: dict[str, Tensor] = {}

    def read(self, module: nn.Module) -> Measured:
        """Compares the tensors with those of the first call."""
        tensors = reference_tensors(module)
        if self._first is None:
            self._first = sample_numbers(tensors)
            self._shards = shards_of(tensors)
            return Measured()
        # A forward pass may leave the module's parameters gathered.
        tensors |= self._shards
        now = sample_numbers({name: tensors[name] for name in self._first})
        flags = [(now[name] != numbers).any() for name, numbers in self._first.items()]
        return Measured(maxima=read_flags(list(self._first), flags))

    def metrics_of(self, totals: dict[str, float]) -> dict[str, float]:
        """Counts those that moved on any rank."""
        if not totals:
            return {}
        return {"ref_tensors_moved": sum(moved > 0 for moved in totals.values())}


def reference_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters that the reference reads: with LoRA all but the adapters."""
    parameters = dict(module.named_parameters())
    return {name: tensor for name, tensor in parameters.items() if base_name(name) is not None}
