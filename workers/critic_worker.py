"""The critic's worker: what a rank holds of the value model, and what it receives.

Invariant: it has the value model alone; where the policy has the values (critic.share_backbone)
there is no such worker.
"""

from functools import partial

from data.protocol import DataProto
from training.config import BatchPlan
from workers.dp_critic import DataParallelPPOCritic
from workers.model.builder import ModelSpec
from workers.model.forward_settings import forward_settings
from workers.model.loss_fields import FORWARD_FIELDS, VALUE_UPDATE_FIELDS
from workers.model.packing_check import check_training
from workers.model.policy_model import ValueModel
from workers.ranks import sharding, worker_process
from workers.ranks.dispatch import Dispatch, register
from workers.training_worker import TrainingWorker


class CriticWorker(TrainingWorker):
    """Holds the value model and its optimiser."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Loads the model.

        The schedule runs over `total_training_steps` calls of `update_critic`.
        """
        worker_process.start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.plan = plan.critic
        section = self.config.resolved_critic
        spec = ModelSpec(section.model, str(section.model.path), self.device)
        module = spec.value_model()
        settings = forward_settings(
            section.model,
            section.use_prefix_grouper,
            module,
            self.device,
            ranks=self.ranks_per_sequence(),
            role="critic",
        )
        check_training(module)
        model = ValueModel(module)
        sharding.shard_model(model, section.fsdp_config, settings.dtype, self.device)
        self._make_trainable(model, module, section, total_training_steps, role="critic")
        self.critic = DataParallelPPOCritic(
            section, model, self.optimizer, forward=settings, probes=self.probes
        )

    @register(Dispatch.DP_COMPUTE_PROTO, reads=FORWARD_FIELDS, ranks_per_chunk="ranks_per_sequence")
    def compute_values(self, data: DataProto) -> DataProto:
        """Computes `values`, (B, response_len)."""
        with self._on_device():
            return DataProto.from_dict(tensors={"values": self.critic.compute_values(data)})

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        reads=VALUE_UPDATE_FIELDS,
        further_reads="further_fields",
        ranks_per_chunk="ranks_per_sequence",
    )
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """Updates the critic once and makes one step of the schedule; returns metrics."""
        return self._update("critic", partial(self.critic.update_critic, data, self.plan))
