"""The algorithms by themselves, on tensors (batch, seq_len); the maths is training/core_algos'.

Losses come as (loss, metrics), a metric being a plain number. For updates written by hand there are a policy with
values, the very model that `critic.share_backbone` trains, and the tensors of a PPO update.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from data.protocol import DataProto
from training import core_algos
from training.batch.torch_functional import masked_mean
from training.core_algos import (
    compute_gae_advantage_return,
    compute_kl_penalty,
    compute_ppo_loss,
    estimate_advantages,
)
from training.core_algos import compute_grpo_outcome_advantage as compute_grpo_advantage
from workers.model.forward import PolicyValueModel as PolicyValueModel

Loss = tuple[Tensor, dict[str, float]]


def compute_policy_loss(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_ratio: float = 0.2,
    **settings: Any,
) -> Loss:
    """Computes PPO's clipped loss, a mean over sampled tokens; `settings` are further ones of PolicyLossConfig."""
    config = core_algos.PolicyLossConfig(clip_ratio=clip_ratio, **settings)
    loss, metrics = core_algos.compute_policy_loss_vanilla(
        old_log_probs, log_probs, advantages, response_mask, config.loss_agg_mode, config
    )
    return loss, {name.removeprefix("actor/"): float(value) for name, value in metrics.items()}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    old_values: Tensor,
    response_mask: Tensor,
    cliprange_value: float = 0.5,
) -> Loss:
    """Computes the clipped regression of values on returns."""
    loss, clipped = core_algos.compute_value_loss(
        vpreds, returns, old_values, response_mask, cliprange_value
    )
    return loss, {"vf_clipfrac": float(clipped)}


def apply_kl_penalty(
    token_level_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
) -> tuple[Tensor, float]:
    """Subtracts `kl_coef` times the KL (k1) from each token's reward; returns that and the mean KL, nats per token."""
    kl = compute_kl_penalty(log_probs, ref_log_probs).where(response_mask.bool(), 0)
    return token_level_rewards - kl_coef * kl, float(masked_mean(kl, response_mask))


class KLController(core_algos.AdaptiveKLController):
    """Keeps the coefficient of the KL, `value`; with `adaptive` it is steered towards `target_kl` nats."""

    def __init__(
        self,
        init_kl_coef: float = 0.001,
        target_kl: float = 0.1,
        adaptive: bool = False,
        horizon: int = 10_000,
    ) -> None:
        super().__init__(init_kl_coef, target_kl, horizon)
        self.adaptive = adaptive

    def update(self, current_kl: float, n_steps: int) -> None:
        """Steers after `n_steps` samples whose mean KL was `current_kl`."""
        if self.adaptive:
            super().update(current_kl, n_steps)


@dataclass(kw_only=True)
class PPOBatch:
    """Holds the tensors of a PPO update: B rows of P prompt and R response tokens, None where there is no such tensor.

    Attributes:
        input_ids, attention_mask: (B, P + R) integers: prompts, padded on the left, and responses, on the right; 1 on
            tokens.
        responses, response_mask: (B, R) integers: the last R of the ids; 1 on those that the policy sampled.
        old_log_probs, ref_log_prob: (B, R) nats.
        values, advantages, returns: (B, R).
    """

    input_ids: Tensor
    attention_mask: Tensor
    responses: Tensor
    response_mask: Tensor
    old_log_probs: Tensor | None = None
    ref_log_prob: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @classmethod
    def from_dataproto(cls, data: DataProto) -> Self:
        """Takes what a batch of the trainer's (`RolloutData.batch`, `on_batch`) has of it."""
        ids = torch.cat([data.batch["prompts"], data.batch["responses"]], dim=1).long()
        held = {
            field.name: data.batch[field.name] for field in fields(cls) if field.name in data.batch
        }
        return cls(**held | {"input_ids": ids, "responses": data.batch["responses"].long()})

    def to_dataproto(self) -> DataProto:
        """Makes a batch that `DataParallelPPOActor` and `DataParallelPPOCritic` read and train on."""
        prompts = self.input_ids[:, : -self.responses.shape[1]]
        held = {
            name: tensor
            for name, tensor in vars(self).items()
            if tensor is not None and name != "input_ids"
        }
        return DataProto.from_dict(tensors={"prompts": prompts, **held})

    def to(self, device: str | torch.device) -> Self:
        """Returns a copy on the device."""
        return replace(
            self,
            **{
                name: tensor.to(device) for name, tensor in vars(self).items() if tensor is not None
            },
        )
