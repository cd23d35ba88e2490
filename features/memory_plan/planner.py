"""The planner: adds up what the models and the engine of a rank take, phase by phase.

Invariant: the ranks of a run are all alike, but for engines with ranks of their own.
"""

import psutil

from features.memory_plan.engine_phases import EnginePlan
from features.memory_plan.fake_numbers import FakeNumbers
from features.memory_plan.model_phases import ModelPlan
from features.memory_plan.models import build_models, without_numbers
from features.memory_plan.planned_run import PlannedRun
from features.memory_plan.table import write_table
from features.memory_plan.terms import GIB, PHASES, MemoryTerms, Phase
from training.config import PPOConfig

# GiB of CUDA devices that a run on CUDA is planned for.
DEVICE_SIZES = (24, 40, 48, 80, 96, 141, 192)


class Planner:
    """Plans the memory of a rank, for the run that a config describes.

    Raises:
        ValueError: a step's rows do not divide into mini-batches.
        OSError: a model's configuration cannot be read.
    """

    def __init__(self, config: PPOConfig) -> None:
        self.run = PlannedRun.of(config)
        self.config = self.run.config
        mode = FakeNumbers()
        with without_numbers(mode):
            self.engine = EnginePlan(self.run, mode)
            models = build_models(self.run)
        self.models = [ModelPlan(model, self.run, mode).plan() for model in models]

    def phases(self, capacity: int) -> dict[Phase, MemoryTerms]:
        """Adds up a rank's bytes in each phase that the run has, in order.

        Where engines have ranks of their own generation is on those, and all else on the others.

        Args:
            capacity: bytes of the CUDA device, of which the engine may take its part.
        """
        parts = [*self.models, self.engine.plan(capacity)]
        phases = {}
        for phase in PHASES:
            if any(phase in part.phases for part in parts):
                phases[phase] = sum((part.in_phase(phase) for part in parts), MemoryTerms())
        return phases

    def tell(self) -> str:
        """Writes the table, whether it fits, and what to change where it does not."""
        plans = {size: self.phases(size * GIB) for size in self._device_sizes()}
        return write_table(plans, model_path=self.run.spec.path, num_ranks=self.run.num_ranks)

    def _device_sizes(self) -> tuple[int, ...]:
        """Lists the GiB that a rank may have: of CUDA devices, or its part of this machine."""
        if self.run.on_cuda:
            return DEVICE_SIZES
        trainer = self.config.trainer
        machines = psutil.virtual_memory().total * trainer.nnodes
        return (machines // trainer.all_ranks // GIB,)
