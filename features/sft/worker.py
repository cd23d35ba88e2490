"""The worker of --sft: the policy without an engine, whose update learns what is given.

Invariant: it trains by the loop, the packing, the sharding and the optimiser of every run
(workers/model/update_loop.py); its loss alone is another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from data.protocol import DataProto
from features.sft.loss import LOSS, cross_entropy
from training import core_algos as algos
from training.config import UpdatePlan
from training.core_algos import GlobalBatchInfo
from workers.dp_actor import DataParallelPPOActor
from workers.fsdp_workers import ActorRolloutRefWorker
from workers.model.loss_fields import loss_fields
from workers.model.packing import ForwardBatch
from workers.model.update_loop import MicroLoss
from workers.ranks.process_groups import world_size


class SFTActor(DataParallelPPOActor):
    """Reads log-probs off the policy of one rank, and learns the tokens of a batch."""

    def update_policy(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Makes the updates of a batch; returns `actor/*` metrics, means over its mini-batches."""
        return self.update(data, plan)

    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes the cross-entropy of one micro-batch; see `UpdateLoop.micro_loss`."""
        fields = loss_fields(micro, self.settings.device)
        mask = fields["response_mask"]
        log_prob, entropy, *_ = self.micro_forward(micro, inputs, "value")
        loss = cross_entropy(log_prob, mask, counts)
        metrics = {
            LOSS: loss.detach() / world_size(),
            "actor/entropy": algos.mean_of_tokens(entropy, mask, counts),
        }
        return MicroLoss(loss, metrics, fields, {"log_prob": log_prob, "entropy": entropy})


class SFTWorker(ActorRolloutRefWorker):
    """Holds the policy that is trained."""

    actor_class: ClassVar[type[DataParallelPPOActor]] = SFTActor

    def _with_temperature(self, data: DataProto) -> DataProto:
        """Returns the data at temperature 1: the loss is that of the model's own distribution."""
        return replace(data, meta_info=data.meta_info | {"temperature": 1.0})
