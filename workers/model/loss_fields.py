"""Which fields of a batch reach the model and the losses: the one list of them.

What a rank is sent (`@register(reads=...)` in workers/fsdp_workers.py), what is cut into
micro-batches, and what a loss finds in its `fields` all follow from it. A batch need not have every
field: a loss looks with `fields.get`, or demands it with `data.require`. What probes and features'
terms of the loss need beside them they name themselves (`UpdateProbe.fields`, `LossTerm.fields`).

Example: weights of tokens that the trainer computes and the policy's loss multiplies with. Three
places change:

    training/step_phases.py       in `_add_loss_fields`:
                                  batch.batch["token_weights"] = ...  # (B, response_len)
    workers/model/loss_fields.py  POLICY_LOSS_FIELDS = (..., "token_weights")
    workers/dp_actor.py           fields["token_weights"], in `micro_loss`

A policy loss that is registered under a name of its own gets a listed field by naming a parameter
after it. data/fields.yaml describes the fields for the errors of `data.require`.
"""

import torch
from torch import Tensor

from data.protocol import DataProto
from workers.model.sequences import to_device

# What a loss reads of a micro-batch, by name: (rows, response_len) or (rows,), on the device.
LossFields = dict[str, Tensor]

# What a forward pass reads: the tokens, and which of them were sampled.
FORWARD_FIELDS: tuple[str, ...] = ("prompts", "responses", "response_mask", "attention_mask")

# meta_info of a batch whose passes compute more than sampled tokens' log-probs (loss_terms.py):
# names of fields (B, response_len), 1 on further tokens to be predicted; and of fields
# (B, response_len, K) of token ids whose log-probs are wanted beside the sampled token's.
PREDICTED = "predicted_fields"
CANDIDATES = "candidate_fields"

# What the policy's passes read beside them, as far as a batch has it.
POLICY_FORWARD_FIELDS = (*FORWARD_FIELDS, "routed_experts")

# What the policy's losses read (workers/dp_actor.py), as far as a batch has it.
POLICY_LOSS_FIELDS: tuple[str, ...] = (
    "advantages",
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "rollout_is_weights",
    "turn_ids",
    "episode_share",
    "observation_mask",
)
# What the values' loss reads (workers/dp_critic.py).
VALUE_LOSS_FIELDS: tuple[str, ...] = ("values", "returns", "episode_share")

POLICY_UPDATE_FIELDS = POLICY_FORWARD_FIELDS + POLICY_LOSS_FIELDS
VALUE_UPDATE_FIELDS = FORWARD_FIELDS + VALUE_LOSS_FIELDS
# A policy that has the values (critic.share_backbone) needs both.
POLICY_AND_VALUE_UPDATE_FIELDS = tuple(dict.fromkeys(POLICY_UPDATE_FIELDS + VALUE_LOSS_FIELDS))


def loss_fields(micro: DataProto, device: torch.device) -> LossFields:
    """Copies to the device what losses read: `response_mask`, and the listed fields there are."""
    names = dict.fromkeys(("response_mask", *POLICY_LOSS_FIELDS, *VALUE_LOSS_FIELDS))
    return {name: to_device(micro.batch[name], device) for name in names if name in micro.batch}


def with_forward_fields(data: DataProto) -> DataProto:
    """Adds what a batch of verl's form lacks of FORWARD_FIELDS, in a copy; else returns the batch.

    verl's has `input_ids` (B, P + R) in place of `prompts`, and without a `response_mask` all of
    the responses was sampled.
    """
    fields = data.batch
    added = {}
    if "prompts" not in fields and {"input_ids", "responses"} <= set(fields.keys()):
        prompt_length = fields["input_ids"].shape[1] - fields["responses"].shape[1]
        added["prompts"] = fields["input_ids"][:, :prompt_length]  # (B, P)
    if "response_mask" not in fields and {"attention_mask", "responses"} <= set(fields.keys()):
        response_length = fields["responses"].shape[1]
        added["response_mask"] = fields["attention_mask"][:, -response_length:]  # (B, R)
    if not added:
        return data
    copy = data.select()
    copy.batch.update(added)
    return copy
