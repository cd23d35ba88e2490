"""Places rewards among a row's tokens.

Invariant: rewards lie only on tokens that the policy sampled (response_mask 1), and a row's sum
stays the same. With A the policy's tokens and E the environment's:

    responses     = A0 A0 E0 A1 A1 E1 pad
    response_mask =  1  1  0  1  1  0   0
    outcome 0.5   =  0  0  0  0 .5  0   0      on the last sampled token, not the last one
"""

import torch
from torch import Tensor

from data.array_ops import row_blocks


def place_outcome_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Places scores (batch,) on each row's last sampled token: (batch, response_len) float32.

    A row without a sampled token gets none.
    """
    rewards = torch.zeros(response_mask.shape, dtype=torch.float32, device=response_mask.device)
    rewards[:, -1] = scores.to(rewards)
    return move_to_sampled_tokens(rewards, response_mask)


def move_to_sampled_tokens(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Moves every reward to the last sampled token at or before it, else to the first one.

    Sums stay the same. Masked advantages would silently drop a reward on an environment's token; it
    belongs to the action it answers. A row without sampled tokens gets zeros. Where nothing is to
    be moved the rewards themselves are returned.
    """
    is_sampled = response_mask.bool()
    blocks = row_blocks(rewards)
    if not any(rewards[rows].masked_fill(is_sampled[rows], 0).any() for rows in blocks):
        return rewards
    return torch.cat([_moved(rewards[rows], is_sampled[rows]) for rows in blocks])


def _moved(rewards: Tensor, is_sampled: Tensor) -> Tensor:
    """Moves the rewards of some rows, (rows, response_len)."""
    positions = torch.arange(is_sampled.shape[1], device=is_sampled.device)
    # The last sampled position at or before each; -1 before the first.
    last = torch.where(is_sampled, positions, -1).cummax(dim=1).values  # (rows, response_len)
    # 0 in a row without sampled tokens.
    first = is_sampled.int().argmax(dim=1, keepdim=True)  # (rows, 1)
    targets = torch.where(last < 0, first, last)
    return torch.zeros_like(rewards).scatter_add(1, targets, rewards) * is_sampled
