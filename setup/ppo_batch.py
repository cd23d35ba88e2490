"""The tensors of a PPO update, for updates that are written by hand.

Invariant: a PPOBatch names its tensors as the trainer's batch does, but for `input_ids`, which is
that one's prompts and responses side by side.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from data.protocol import DataProto


@dataclass(kw_only=True)
class PPOBatch:
    """Holds the tensors of a PPO update: B rows of P prompt and R response tokens.

    A tensor that there is not is None.

    Attributes:
        input_ids, attention_mask: (B, P + R) integers: prompts, padded on the left, and responses,
            on the right; 1 on tokens.
        responses, response_mask: (B, R) integers: the last R of the ids; 1 on those that the policy
            sampled.
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
        prompts = data.batch["prompts"]
        responses = data.batch["responses"].long()
        tensors = {
            field.name: data.batch[field.name] for field in fields(cls) if field.name in data.batch
        }
        tensors["input_ids"] = torch.cat([prompts, data.batch["responses"]], dim=1).long()
        tensors["responses"] = responses
        return cls(**tensors)

    def to_dataproto(self) -> DataProto:
        """Makes a batch that DataParallelPPOActor and DataParallelPPOCritic read and train on."""
        tensors = self._tensors()
        input_ids = tensors.pop("input_ids")
        prompts = input_ids[:, : -self.responses.shape[1]]
        return DataProto.from_dict(tensors={"prompts": prompts, **tensors})

    def to(self, device: str | torch.device) -> Self:
        """Returns a copy on the device."""
        moved = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def _tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}
