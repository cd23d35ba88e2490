"""The value model's two jobs: values of given responses, and the clipped regression over mini- and micro-batches.

Invariant: as for the policy, the gradient of a mini-batch does not depend on how it is split into micro-batches.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from data.protocol import DataProto
from training.config import CriticConfig, UpdatePlan
from training.core_algos import GlobalBatchInfo, compute_value_loss, denominators
from workers.model.forward import FORWARD_FIELDS, ForwardBatch, ForwardSettings, ValueModel, loss_fields
from workers.model.update import MicroLoss, Trained
from workers.ranks.distributed import world_size

# What a loss reads of a micro-batch, by name; and a loss with its metrics.
Fields = dict[str, Tensor]
Loss = tuple[Tensor, dict[str, Any]]


class DataParallelPPOCritic(Trained):
    """Is the value model of one rank; arguments as for `DataParallelPPOActor`."""

    def __init__(
        self,
        config: CriticConfig,
        critic_module: nn.Module,
        critic_optimizer: Optimizer | None = None,
        *,
        forward: ForwardSettings | None = None,
    ) -> None:
        self.critic_module = critic_module if isinstance(critic_module, ValueModel) else ValueModel(critic_module)
        super().__init__(config, self.critic_module, critic_optimizer, forward)

    def compute_values(self, data: DataProto) -> Tensor:
        """Computes the value of the state before each sampled token: (B, response_len) float32, CPU, zero elsewhere."""
        return self.read(data, "compute_values", None)[0]

    def update_critic(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Regresses on `returns`, clipped around `values`, as planned; returns the mean `critic/*` of mini-batches.

        Without a plan a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        data.require(*FORWARD_FIELDS, "values", "returns", by="update_critic")
        return self.update(data, plan, "critic")

    def micro_loss(self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo) -> MicroLoss:
        """Computes the values' loss; see `Trained`."""
        fields = loss_fields(micro, self.settings.device)
        return MicroLoss(*value_loss(self.micro_forward(micro, inputs)[0], fields, self.config, counts), {})


def value_loss(vpreds: Tensor, fields: Fields, config: CriticConfig, counts: GlobalBatchInfo) -> Loss:
    """Computes the loss of a micro-batch's values (rows, response_len), and its `critic/*`; see `MicroLoss`."""
    mask, rule = fields["response_mask"], (config.cliprange_value, config.loss_agg_mode)
    with denominators(counts, fields.get("episode_share")):
        loss, clip_fraction = compute_value_loss(vpreds, fields["returns"], fields["values"], mask, *rule, **counts)
    mean = (vpreds.detach() * mask).sum() / max(counts["batch_num_tokens"] or 0, 1)
    metrics = {"vf_loss": loss / world_size(), "vf_clipfrac": clip_fraction, "vpred_mean": mean}
    return loss, {f"critic/{name}": value for name, value in metrics.items()}
