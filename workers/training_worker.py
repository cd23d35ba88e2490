"""What a worker that trains a model has: the model, its optimiser and schedule, checkpoints.

Invariant: weights change only in `_update`, which waits until a checkpoint that is being written
has its copy.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from training.config import ActorConfig, CriticConfig, PPOConfig
from training.config.batch_plan import UpdatePlan
from training.config.checks import load_custom_algorithm
from workers.model import state as model_state
from workers.model.builder import find_device
from workers.model.checkpoint_writer import CheckpointWriter
from workers.model.companion import Companion
from workers.model.optimizer import build_optimizer, build_scheduler
from workers.model.probe_set import UpdateProbes
from workers.model.probes_of_run import open_probes
from workers.ranks import memory, offload, worker_process
from workers.ranks.dispatch import Dispatch, register

Metrics = dict[str, float]


class TrainingWorker:
    """Holds a module that trains, with its optimiser and schedule, and saves and loads them.

    Attributes:
        plan: how an update passes over this rank's rows.
        section: the module's settings, `actor_rollout_ref.actor` or `critic`.
        model: what is sharded and run.
        module: the part of it that trains, and that is saved.
        probes: what measures updates.
        tokenizer: what a Hugging Face folder is written with, where a checkpoint is to have one.
        companions: what features keep beside the model, by name.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    plan: UpdatePlan
    companions: dict[str, Companion]
    section: ActorConfig | CriticConfig

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.device = find_device(config.trainer.device)
        self.probes = UpdateProbes()
        self.companions = {}
        # A rank's process has registered none of the driver's.
        if config.custom_algorithm:
            load_custom_algorithm(config.custom_algorithm)

    def _make_trainable(
        self,
        model: nn.Module,
        module: nn.Module,
        section: ActorConfig | CriticConfig,
        total_steps: int,
        role: str,
    ) -> None:
        """Makes optimiser and schedule, over so many steps, of `module`, a part of `model`.

        And the probes of its updates: those of the role, "actor" or "critic".
        """
        self.model = model
        self.module = module
        self.section = section
        self.optimizer = build_optimizer(module, section.optim)
        self.scheduler = build_scheduler(self.optimizer, section.optim, total_steps)
        self.probes = UpdateProbes(open_probes(self.config, role))
        self.state = (module, self.optimizer, self.scheduler)
        self.writer = CheckpointWriter()
        offload.offload(model, self.optimizer, section.fsdp_config)

    def _on_device(self, optimizer: Optimizer | None = None) -> AbstractContextManager[None]:
        """Brings the model to the device for the block, with `optimizer` its state, too."""
        return offload.on_device(self.model, optimizer, self.device, self.section.fsdp_config)

    @register(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Begins to save; `checkpoint_written` tells when it is done."""
        contents = self.section.checkpoint.save_contents
        model_state.save(
            self.writer, Path(folder), self.state, contents, self.tokenizer, self._beside()
        )

    @register(Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool) -> bool:
        """Checks whether the checkpoint is on disk; see `CheckpointWriter.is_written`."""
        return self.writer.is_written(wait)

    @register(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Reads what `save_checkpoint` wrote, in place."""
        model_state.load(
            Path(folder),
            self.state,
            self.section.checkpoint.load_contents,
            other_optimizer=self.config.trainer.resume_with_changes,
        )
        for name, tensors in self._beside().items():
            if not model_state.load_beside(Path(folder), name, tensors):
                self.companions[name].begin()

    def _beside(self) -> dict[str, dict[str, Tensor]]:
        """Returns the tensors of the companions, by their names."""
        return {name: companion.tensors() for name, companion in self.companions.items()}

    @register(Dispatch.RANK_ZERO)
    def ranks_per_sequence(self) -> int:
        """Returns the size of a sequence-parallel group."""
        return self.config.actor_rollout_ref.actor.ulysses_sequence_parallel_size

    @register(Dispatch.RANK_ZERO)
    def further_fields(self) -> tuple[str, ...]:
        """Lists the fields that updates need beside those that losses read: their probes'."""
        return self.probes.fields()

    @register(Dispatch.ALL_TO_ALL)
    def take_probe_records(self) -> dict[str, Any]:
        """Returns this rank's records of the last update, by probe, once."""
        return self.probes.take_records()

    def _update(self, prefix: str, update: Callable[[], Metrics]) -> Metrics:
        """Runs an update once a checkpoint has its copy, and steps the schedule.

        Returns: the update's metrics, and PREFIX/lr.
        """
        self.writer.wait_until_copied()
        deterministic = worker_process.strictly_deterministic(self.config.trainer.deterministic)
        with (
            memory.expandable_segments(self.device),
            deterministic,
            self._on_device(self.optimizer),
        ):
            metrics = update()
            for companion in self.companions.values():
                companion.updated()
        metrics[f"{prefix}/lr"] = float(self.optimizer.param_groups[0]["lr"])
        self.scheduler.step()
        return metrics
