"""The worker of an evaluation: an engine with the weights that are evaluated, and nothing else.

Invariant: no model that trains is ever built: no master weights, no optimiser, no gradients.
"""

from features.evaluation.evaluated_weights import EvaluatedWeights, send_weights
from training.config import BatchPlan
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.model.builder import ModelSpec
from workers.ranks import worker_process
from workers.ranks.dispatch import Dispatch, register


class EvaluationWorker(ActorRolloutRefWorker):
    """Generates, as the policy's worker does between two updates."""

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self, total_training_steps: int, plan: BatchPlan) -> None:
        """Builds the engine; `load_weights` is to follow."""
        worker_process.start_worker(self.device, deterministic=self.config.trainer.deterministic)
        self.spec = ModelSpec(self.policy.model, str(self.policy.model.path), self.device)
        self._init_rollout()

    @register(Dispatch.ONE_TO_ALL)
    def load_weights(self, weights: EvaluatedWeights) -> None:
        """Brings the weights that are evaluated to the engine."""
        as_adapter = self.policy.rollout.lora_as_adapter
        send_weights(weights, self.rollout, self.spec, as_adapter=as_adapter)
