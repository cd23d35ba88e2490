"""The value model's two jobs: values of given responses, and the clipped value regression over mini- and micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from data.protocol import DataProto
from training.config import CriticConfig
from training.core_algos import compute_value_loss
from workers.distributed import world_size
from workers.dp_actor import MetricSums, clip_grad_norm, global_counts, order_rows
from workers.forward import ForwardSettings, ValueModel, iter_micro_batches, on_grid


class DataParallelPPOCritic:
    """The value model of one rank; arguments as for `DataParallelPPOActor`."""

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

    @torch.no_grad()
    def compute_values(self, data: DataProto) -> Tensor:
        """(B, response_len) float32 on the CPU: the value of the state before each sampled token, zero elsewhere."""
        self.critic_module.eval()
        data.require("prompts", "responses", "response_mask", "attention_mask", by="compute_values")
        values = torch.zeros(data.batch["responses"].shape)
        for rows, micro, trees in iter_micro_batches(data, self.settings, self.config.micro_batching):
            with self.settings.autocast():
                values[rows] = on_grid(self.critic_module(trees), trees, micro.batch["responses"].shape).cpu()
        return values

    def update_critic(
        self, data: DataProto, mini_batch_rows: int | None = None, epochs: int | None = None
    ) -> dict[str, float]:
        """Regresses on `returns`, clipped around `values`. Returns the mean over mini-batches of `critic/*` metrics."""
        self.critic_module.train()
        data.require("prompts", "responses", "response_mask", "attention_mask", "values", "returns", by="update_critic")
        rows_per_batch = mini_batch_rows or self.config.ppo_mini_batch_size or len(data)
        batches = order_rows(data, epochs or self.config.ppo_epochs or 1, self.config.shuffle, rows_per_batch)
        sums = MetricSums(self.settings.sequence_ranks)
        for rows in batches:
            self._update_mini_batch(data.select_idxs(rows), sums, 1 / len(batches))
        return sums.read()

    def _update_mini_batch(self, mini: DataProto, sums: MetricSums, weight: float) -> None:
        assert self.critic_optimizer is not None
        counts = global_counts(mini.batch["response_mask"], self.settings.sequence_ranks)
        self.critic_optimizer.zero_grad(set_to_none=True)
        for _, micro, trees in iter_micro_batches(mini, self.settings, self.config.micro_batching):
            fields = micro.batch.to(self.settings.device)
            mask = fields["response_mask"]
            with self.settings.autocast():
                vpreds = on_grid(self.critic_module(trees), trees, mask.shape)
            loss, clip_fraction = compute_value_loss(
                vpreds=vpreds,
                returns=fields["returns"],
                values=fields["values"],
                response_mask=mask,
                cliprange_value=self.config.cliprange_value,
                loss_agg_mode=self.config.loss_agg_mode,
                **counts,
            )
            loss.backward()
            mean = (vpreds.detach() * mask).sum() / max(counts["batch_num_tokens"] or 0, 1)
            sums.add(
                {"critic/vf_loss": loss / world_size(), "critic/vf_clipfrac": clip_fraction, "critic/vpred_mean": mean},
                weight,
            )
        norm = clip_grad_norm(self.critic_module, self.config.grad_clip)
        if torch.isfinite(norm) and counts["batch_num_tokens"]:
            self.critic_optimizer.step()
        sums.add_norm("critic", norm, weight)
