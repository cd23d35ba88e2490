"""Advantage estimators that see turns: the reward of a turn is credited to it, and to those before it.

Invariant: every estimator is pure, and the results are zero outside the mask. With two turns of an episode,

    turn_ids            =  0  0 -1 -1  1  1  1 -1      of each sampled token
    token_level_rewards =  0 .2  0  0  0  0  1  0      turn 0 gets .2, turn 1 gets 1
    return of turn 0    = .2 + turn_gamma * 1
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data.containers import row_blocks
from training.batch.torch_functional import at_least_float32, masked_whiten
from training.core_algos.advantages import discounted_returns, gae_scan
from training.core_algos.group_advantages import Advantages, Groups, compute_grpo_outcome_advantage, numbered
from training.core_algos.registry import built_in_adv_est


@dataclass(frozen=True)
class Turns:
    """Holds an episode's turns beside its tokens.

    Attributes:
        ids: (batch, response_len) integers, the turn of each sampled token.
        sampled: (batch, response_len) bool.
        last: (batch, turns) int64, the place of each turn's last sampled token; -1 where it has none.
        rewards: (batch, turns), the sum over each turn's sampled tokens.
    """

    ids: Tensor
    sampled: Tensor
    last: Tensor
    rewards: Tensor

    @property
    def exists(self) -> Tensor:
        """Says which turns have a sampled token: (batch, turns) bool."""
        return self.last >= 0

    @classmethod
    def of(cls, token_level_rewards: Tensor, response_mask: Tensor, turn_ids: Tensor) -> "Turns":
        """Finds the turns of a batch, whose numbers never fall along a row."""
        sampled, (rewards,) = response_mask.bool(), at_least_float32(token_level_rewards)
        blocks = row_blocks(sampled) if sampled.numel() else []
        most = max((int(torch.where(sampled[rows], turn_ids[rows], 0).max()) for rows in blocks), default=0)
        sums = rewards.new_zeros(len(sampled), most + 2)
        turns = cls(turn_ids, sampled, sums[:, :-1], sums[:, :-1])
        for rows, of_token in turns._blocks():
            sums[rows].scatter_add_(1, of_token, rewards[rows])
        return replace(turns, last=turns.places("amax", -1))

    def _blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields rows with the turn of each of their tokens; of one that is not sampled it is one behind the last."""
        for rows in row_blocks(self.sampled):
            yield rows, torch.where(self.sampled[rows], self.ids[rows], self.rewards.shape[1]).long()

    def spread(self, per_turn: Tensor) -> Tensor:
        """Gives every sampled token its turn's number: (batch, turns) -> (batch, response_len)."""
        padded = pad(per_turn.to(self.rewards.dtype), (0, 1))
        spread = torch.empty_like(self.sampled, dtype=padded.dtype)
        for rows, of_token in self._blocks():
            torch.gather(padded[rows], 1, of_token, out=spread[rows])
        return spread

    def places(self, which: str, none: int) -> Tensor:
        """Finds each turn's first (amin) or last (amax) sampled token: (batch, turns) int64, `none` without one."""
        found = self.ids.new_full((len(self.sampled), self.rewards.shape[1] + 1), none, dtype=torch.long)
        columns = torch.arange(self.sampled.shape[1], device=found.device)
        for rows, of_token in self._blocks():
            found[rows].scatter_reduce_(1, of_token, columns.expand_as(of_token), which)
        return found[:, :-1]


@built_in_adv_est("turn_gae", "episodes")
def compute_turn_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    config: Any = None,
    whiten: bool = True,
) -> Advantages:
    """Runs GAE over turns, and inside each turn over its tokens towards the turn's return (arXiv:2504.20073).

    With V_k the value before turn k's first token, A_k is GAE over turns and A_k + V_k what its tokens are to reach.

    Args:
        token_level_rewards, values, response_mask, turn_ids: (batch, response_len).
        gamma, lam: discount and GAE's lambda per token, inside a turn.
        config: has turn_gamma and turn_lam, those per turn; None: 1.
        whiten: over all tokens, as `gae` does.
    Returns:
        advantages, returns = advantages before whitening + values: (batch, response_len), zero where masked.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    rewards, values = at_least_float32(token_level_rewards, values)
    exists, width = turns.exists, values.shape[1]
    before = values.gather(1, turns.places("amin", width).clamp(max=width - 1))
    targets = gae_scan(turns.rewards, before, exists, None, *_per_turn(config))[1]
    # What comes after the turn is credited to its last token.
    ends = exists.nonzero()[:, 0], turns.last[exists]
    rewards = rewards.index_put(ends, (targets - turns.rewards)[exists], accumulate=True)
    continues = torch.ones_like(turns.sampled).index_put_(ends, torch.tensor(False, device=values.device))
    advantages, returns = gae_scan(rewards, values, turns.sampled, continues, gamma, lam)
    return masked_whiten(advantages, turns.sampled) if whiten else advantages, returns


@built_in_adv_est("turn_return", "groups")
def compute_turn_return_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    config: Any = None,
    leave_one_out: bool = True,
) -> Advantages:
    """Gives each turn its discounted return less the mean return of turn k in the group's other episodes.

    A_{i,k} = G_{i,k} - mean(G_{j,k}, j != i that reached turn k), with G_{i,k} = sum_{l >= k} turn_gamma^(l-k) r_{i,l};
    nothing is subtracted where no other episode reached it. That is unbiased, though policies decide how long episodes
    are: what others do does not depend on this one. A mean that includes the episode itself (`leave_one_out` False)
    scales turn k by m / (m + 1), where m others reached it.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        config: has turn_gamma; None: 1.
    Returns: advantages, returns (G, of each token's turn): (batch, response_len), zero outside the mask.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    returns = discounted_returns(turns.rewards, turns.exists, _per_turn(config)[0])  # (batch, turns)
    number = torch.arange(returns.shape[1], device=returns.device)
    ids = numbered(index, returns.device)[:, None] * returns.shape[1] + number
    groups = Groups(ids.flatten(), turns.exists.flatten())
    above = groups.deviation(returns.flatten().double())
    if leave_one_out:
        alone = groups.size == 1
        above = torch.where(alone, returns.flatten(), above * groups.size / (groups.size - 1).clamp(min=1))
    return turns.spread(above.view_as(returns)), turns.spread(returns)


@built_in_adv_est("gigpo", "groups")
def compute_gigpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    anchors: Sequence[Sequence[str]],
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """Adds to GRPO's advantage of the episode one of each turn among those that began in the same state: GiGPO.

    A = A_episode + gigpo_step_weight * A_turn; A_turn compares the turn's discounted return with those of the group's
    turns, of any number and episode, whose anchor is the same (arXiv:2505.10978, eq. 6 to 8). A state that was met once
    says nothing: 0.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        anchors: for each episode the state that each of its turns began in.
        norm_adv_by_std_in_grpo: divide both parts by their standard deviation.
        config: has turn_gamma and gigpo_step_weight; None: 1.
    Returns: advantages, returns (the turn's discounted one): (batch, response_len), zero outside the mask.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    returns = discounted_returns(turns.rewards, turns.exists, _per_turn(config)[0])  # (batch, turns)
    episodes, numbers = turns.exists.nonzero(as_tuple=True)
    counts = turns.exists.cumsum(1).new_tensor([len(states) for states in anchors])
    if bool((numbers >= counts[episodes]).any()):
        raise ValueError(f"gigpo: {int(turns.exists.sum())} turns were played, and anchors name {int(counts.sum())}")
    offsets = counts.cumsum(0) - counts
    states = numbered(list(chain.from_iterable(anchors)), returns.device)[offsets[episodes] + numbers]
    ids = numbered(index, returns.device)[episodes] * (int(states.max()) + 1 if len(states) else 1) + states
    same_state = Groups(torch.unique(ids, return_inverse=True)[1], torch.ones_like(ids, dtype=torch.bool))
    above = same_state.deviation(returns[episodes, numbers].double())
    if norm_adv_by_std_in_grpo:
        above = above / (same_state.std(above) + epsilon)
    of_turns = torch.zeros_like(returns).index_put((episodes, numbers), above.to(returns.dtype))
    given = token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo
    whole, _ = compute_grpo_outcome_advantage(*given)
    weight = 1.0 if config is None else config.gigpo_step_weight
    return whole + weight * turns.spread(of_turns), turns.spread(returns)


def _per_turn(config: Any) -> tuple[float, float]:
    """Returns discount and GAE's lambda per turn."""
    return (1.0, 1.0) if config is None else (config.turn_gamma, config.turn_lam)
