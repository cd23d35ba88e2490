"""The value model of one rank: values of states, and their regression over mini-batches.

Invariant: the gradient of a mini-batch does not depend on how it is split into micro-batches; every
mean is a sum divided by the count of the whole mini-batch, which is passed down.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from data.protocol import DataProto
from training import core_algos as algos
from training.config import CriticConfig, UpdatePlan
from training.core_algos import GlobalBatchInfo
from workers.model.forward_settings import ForwardSettings
from workers.model.loss_fields import (
    FORWARD_FIELDS,
    LossFields,
    loss_fields,
    with_forward_fields,
)
from workers.model.packing import ForwardBatch
from workers.model.policy_model import ValueModel
from workers.model.probe_set import UpdateProbes
from workers.model.update_loop import MicroLoss, UpdateLoop
from workers.ranks.process_groups import world_size


class DataParallelPPOCritic(UpdateLoop):
    """Reads values off the value model of one rank, and updates it.

    Args:
        config: `critic`.
        critic_module: a transformer with one output a token, or a `ValueModel` around it.
        critic_optimizer: None for a model that is only read.
        forward: compute type, device and packing.
        probes: what measures its updates.
    """

    name = "critic"

    def __init__(
        self,
        config: CriticConfig,
        critic_module: nn.Module,
        critic_optimizer: Optimizer | None = None,
        *,
        forward: ForwardSettings | None = None,
        probes: UpdateProbes | None = None,
    ) -> None:
        if not isinstance(critic_module, ValueModel):
            critic_module = ValueModel(critic_module)
        self.critic_module = critic_module
        super().__init__(
            config,
            critic_module,
            critic_optimizer,
            forward,
            probes,
            trained=critic_module.transformer,
        )

    def compute_values(self, data: DataProto) -> Tensor:
        """Computes values of the states before sampled tokens: (B, response_len) float32, CPU.

        They are zero elsewhere.
        """
        [values] = self.read(data, "compute_values", None)
        return values

    def update_critic(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Regresses on `returns`, clipped around `values`, as planned; returns mean `critic/*`.

        Without a plan a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        data = with_forward_fields(data)
        data.require(*FORWARD_FIELDS, "values", "returns", by="update_critic")
        return self.update(data, plan)

    def micro_loss(
        self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo
    ) -> MicroLoss:
        """Computes the values' loss; see `UpdateLoop.micro_loss`."""
        fields = loss_fields(micro, self.settings.device)
        [values] = self.micro_forward(micro, inputs)  # (rows, response_len)
        loss, metrics = value_loss(values, fields, self.config, counts)
        return MicroLoss(loss, metrics, fields, {"values": values})


def value_loss(
    vpreds: Tensor, fields: LossFields, config: CriticConfig, counts: GlobalBatchInfo
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the clipped loss of a micro-batch's values, and its `critic/*`; see `MicroLoss`.

    Args:
        vpreds: (rows, response_len), with a gradient.
        fields: `values` before the update, `returns`, `response_mask`: (rows, response_len) each.
    """
    mask = fields["response_mask"]
    loss, clip_fraction = algos.compute_value_loss(
        vpreds,
        fields["returns"],
        fields["values"],
        mask,
        cliprange_value=config.cliprange_value,
        loss_agg_mode=config.aggregation,
        row_weights=fields.get("episode_share"),
        **counts,
    )
    tokens = max(counts["batch_num_tokens"] or 0, 1)
    metrics = {
        # The loss carries the factor of all ranks, because ranks average their gradients.
        "critic/vf_loss": loss / world_size(),
        "critic/vf_clipfrac": clip_fraction,
        "critic/vpred_mean": (vpreds.detach() * mask).sum() / tokens,
    }
    return loss, metrics
