"""Measures how old the weights were that sampled a batch, and masks what is too old.

Version v of the weights is what step v leaves behind; `weight_versions` (B, R) holds each sampled
token's. Invariant: no token that a step trains on is of weights older than `trainer.async_level`
updates.
"""

import torch

from data.protocol import DataProto
from training.core_algos.masked_ops import masked_mean


def mask_stale_groups(batch: DataProto, step: int, max_age: int) -> dict[str, float]:
    """Masks, in place, every group that has a token which is too old; measures how old tokens are.

    Args:
        batch: with response_mask, weight_versions (B, R) and uid (B,).
        step: the step that is to be trained; its tokens were at best sampled by the weights of
            `step - 1`.
        max_age: updates that a token may be old.
    Returns:
        async/staleness_mean and async/staleness_max (updates, over sampled tokens),
            async/dropped_groups.
    """
    mask = batch.batch["response_mask"].bool()  # (B, R)
    age = torch.where(mask, step - 1 - batch.batch["weight_versions"], 0)  # (B, R)
    uids = batch.non_tensor_batch["uid"]
    oldest_of_row = age.amax(dim=1).tolist()
    stale = {uid for uid, oldest in zip(uids, oldest_of_row, strict=True) if oldest > max_age}
    fresh = torch.tensor([uid not in stale for uid in uids])  # (B,)
    batch.batch["response_mask"] = batch.batch["response_mask"] * fresh[:, None]
    return {
        "async/staleness_mean": masked_mean(age.float(), mask).item(),
        "async/staleness_max": float(age.max()),
        "async/dropped_groups": float(len(stale)),
    }
