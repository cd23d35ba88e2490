"""A policy with values, and the tensors of a PPO update, for updates written by hand with `setup.algo`.

Invariant: `PolicyValueModel` is the very model that `critic.share_backbone` trains.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from data.protocol import DataProto
from workers.model.forward import PolicyValueModel as PolicyValueModel


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
        held = {field.name: data.batch[field.name] for field in fields(cls) if field.name in data.batch}
        return cls(**held | {"input_ids": ids, "responses": data.batch["responses"].long()})

    def to_dataproto(self) -> DataProto:
        """Makes a batch that `DataParallelPPOActor` and `DataParallelPPOCritic` read and train on."""
        prompts = self.input_ids[:, : -self.responses.shape[1]]
        held = {name: tensor for name, tensor in vars(self).items() if tensor is not None and name != "input_ids"}
        return DataProto.from_dict(tensors={"prompts": prompts, **held})

    def to(self, device: str | torch.device) -> Self:
        """Returns a copy on the device."""
        return replace(self, **{name: tensor.to(device) for name, tensor in vars(self).items() if tensor is not None})
