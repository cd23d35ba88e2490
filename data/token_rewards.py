"""Where a reward lies among a row's tokens.

Invariant: rewards lie only on tokens that the policy sampled (response_mask 1), and a row's sum stays the same. With A
the policy's tokens and E the environment's:

    responses     = A0 A0 E0 A1 A1 E1 pad
    response_mask =  1  1  0  1  1  0   0
    outcome 0.5   =  0  0  0  0 .5  0   0      on the last sampled token, although an environment's token is last
"""

import torch
from torch import Tensor

from data.containers import row_blocks


def place_outcome_rewards(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Places scores (batch,) on each row's last sampled token, none in a row without one: (batch, response_len)."""
    rewards = torch.zeros(response_mask.shape, dtype=torch.float32, device=response_mask.device)
    rewards[:, -1] = scores.to(rewards)
    return move_to_sampled_tokens(rewards, response_mask)


def move_to_sampled_tokens(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Moves every reward to the last sampled token at or before it, to the first one where none is; sums stay the same.

    Masked advantages would silently drop a reward on an environment's token; it belongs to the action it answers.
    A row without sampled tokens gets zeros. Where nothing is to be moved the rewards themselves are returned.
    """
    sampled, blocks = response_mask.bool(), row_blocks(rewards)
    if not any(rewards[rows].masked_fill(sampled[rows], 0).any() for rows in blocks):
        return rewards
    return torch.cat([_moved(rewards[rows], sampled[rows]) for rows in blocks])


def _moved(rewards: Tensor, sampled: Tensor) -> Tensor:
    positions = torch.arange(sampled.shape[1], device=sampled.device)
    last = torch.where(sampled, positions, -1).cummax(dim=1).values  # (batch, response_len)
    first = sampled.int().argmax(dim=1, keepdim=True)  # (batch, 1), 0 in a row without sampled tokens
    target = torch.where(last < 0, first, last)
    return torch.zeros_like(rewards).scatter_add(1, target, rewards) * sampled
