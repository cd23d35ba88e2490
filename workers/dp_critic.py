"""The value model's two jobs: values of given responses, and the clipped regression over mini- and micro-batches.

Invariant: as for the policy, the gradient of a mini-batch does not depend on how it is split into micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.config import CriticConfig, UpdatePlan
from training.core_algos import GlobalBatchInfo, compute_value_loss, denominators
from workers.model import packing
from workers.model.forward import ValueModel
from workers.model.packing import FORWARD_FIELDS, ForwardBatch, ForwardSettings
from workers.model.update import MicroLoss, update_model
from workers.ranks.distributed import world_size


class DataParallelPPOCritic:
    """Is the value model of one rank; arguments as for `DataParallelPPOActor`."""

    def __init__(
        self,
        config: CriticConfig,
        critic_module: nn.Module,
        critic_optimizer: torch.optim.Optimizer | None = None,
        *,
        forward: ForwardSettings | None = None,
    ) -> None:
        self.config = config
        self.critic_module = critic_module if isinstance(critic_module, ValueModel) else ValueModel(critic_module)
        self.critic_optimizer = critic_optimizer
        self.settings = forward or ForwardSettings()

    def forward(self, inputs: ForwardBatch, shape: torch.Size) -> Tensor:
        """Computes the values of a micro-batch, of `shape` (rows, response_len); zero where nothing was sampled."""
        with self.settings.autocast():
            return packing.scatter_tokens(self.critic_module(inputs), inputs, shape)

    @torch.no_grad()
    def compute_values(self, data: DataProto) -> Tensor:
        """Computes the value of the state before each sampled token: (B, response_len) float32, CPU, zero elsewhere."""
        self.critic_module.eval()
        data.require(*FORWARD_FIELDS, by="compute_values")
        batches = packing.iter_micro_batches(data, self.settings, self.config.micro_batching)
        read = [(rows, self.forward(inputs, micro.batch["responses"].shape)) for rows, micro, inputs in batches]
        return packing.read_rows(read)

    def update_critic(self, data: DataProto, plan: UpdatePlan | None = None) -> dict[str, float]:
        """Regresses on `returns`, clipped around `values`, as planned; returns the mean `critic/*` of mini-batches.

        Without a plan a mini-batch has `ppo_mini_batch_size` rows, or all.
        """
        assert self.critic_optimizer is not None
        self.critic_module.train()
        cfg = self.config
        data.require(*FORWARD_FIELDS, "values", "returns", by="update_critic")
        size = cfg.ppo_mini_batch_size or len(data)
        plan = plan or UpdatePlan.of_rows(len(data), size, cfg.ppo_epochs or 1, cfg.shuffle)
        return update_model(self, self.critic_module, self.critic_optimizer, data, plan, "critic")

    def micro_loss(self, micro: DataProto, inputs: ForwardBatch, counts: GlobalBatchInfo) -> MicroLoss:
        """Computes the values' loss; see `Trained`."""
        fields = packing.loss_fields(micro, self.settings.device)
        mask = fields["response_mask"]
        vpreds = self.forward(inputs, mask.shape)
        with denominators(counts, fields.get("episode_share")):
            rule = self.config.cliprange_value, self.config.loss_agg_mode
            loss, clip_fraction = compute_value_loss(vpreds, fields["returns"], fields["values"], mask, *rule, **counts)
        mean = (vpreds.detach() * mask).sum() / max(counts["batch_num_tokens"] or 0, 1)
        metrics = {"vf_loss": loss / world_size(), "vf_clipfrac": clip_fraction, "vpred_mean": mean}
        return MicroLoss(loss, {f"critic/{name}": value for name, value in metrics.items()}, {})
