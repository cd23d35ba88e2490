"""Advantage estimators that see the turns of an episode, and credit a turn with its own reward.

Layout of a row with two turns and the environment's reply between them:

    response_mask       =  1  1  0  0  1  1  1  0
    turn_ids            =  0  0 -1 -1  1  1  1 -1      the turn of each sampled token
    token_level_rewards =  0 .2  0  0  0  0  1  0      turn 0 gets .2, turn 1 gets 1
    return of turn 0    = .2 + turn_gamma * 1

Invariant: every estimator is pure, and rewards and values of masked tokens change nothing; the
results are zero there. Numbers are float32, or float64 where the rewards are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from training.core_algos.group_advantages import compute_grpo_outcome_advantage
from training.core_algos.groups import Groups, consecutive_ids
from training.core_algos.masked_ops import at_least_float32, masked_whiten
from training.core_algos.registry import Advantages, register_adv_est
from training.core_algos.token_advantages import discounted_returns, gae_scan


@dataclass(frozen=True)
class Turns:
    """Holds the turns of a batch's episodes beside their tokens.

    Attributes:
        turn_of_token: (batch, response_len) int64, the turn of each sampled token; of others it is
            `turns`, one behind the last.
        sampled: (batch, response_len) bool.
        rewards: (batch, turns), the sum over each turn's sampled tokens.
    """

    turn_of_token: Tensor
    sampled: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, token_level_rewards: Tensor, response_mask: Tensor, turn_ids: Tensor) -> "Turns":
        """Finds the turns of a batch, whose numbers never fall along a row.

        Args: token_level_rewards, response_mask, turn_ids: (batch, response_len).
        """
        sampled = response_mask.bool()
        (rewards,) = at_least_float32(token_level_rewards)
        turns = 1
        if sampled.numel():
            turns = int(torch.where(sampled, turn_ids, 0).max()) + 1
        turn_of_token = torch.where(sampled, turn_ids, turns).long()
        sums = rewards.new_zeros(len(sampled), turns + 1)
        sums = sums.scatter_add_(1, turn_of_token, rewards)
        return cls(turn_of_token, sampled, rewards=sums[:, :-1])

    @cached_property
    def last(self) -> Tensor:
        """Returns the place of each turn's last sampled token, -1 without one: (batch, turns)."""
        return self._places("amax", without=-1)

    def first(self, without: int) -> Tensor:
        """Returns the place of each turn's first sampled token, or `without`: (batch, turns)."""
        return self._places("amin", without=without)

    @property
    def exists(self) -> Tensor:
        """Returns which turns have a sampled token: (batch, turns) bool."""
        return self.last >= 0

    def spread(self, per_turn: Tensor) -> Tensor:
        """Gives every sampled token its turn's number: (batch, turns) -> (batch, response_len)."""
        zero_behind_last = pad(per_turn.to(self.rewards.dtype), (0, 1))
        return zero_behind_last.gather(1, self.turn_of_token)

    def _places(self, reduction: Literal["amin", "amax"], without: int) -> Tensor:
        """Reduces the places of each turn's sampled tokens, `without` where it has none."""
        rows, turns = self.rewards.shape
        columns = torch.arange(self.sampled.shape[1], device=self.sampled.device)
        columns = columns.expand_as(self.turn_of_token)
        places = columns.new_full((rows, turns + 1), without)
        return places.scatter_reduce_(1, self.turn_of_token, columns, reduction)[:, :-1]


@register_adv_est(
    "turn_gae",
    span="episodes",
    whitens_batch=True,
    formula="GAE over turns, in each turn GAE over tokens towards its return, then whitened",
    follows_returns=True,
)
@torch.no_grad()
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
    """Runs GAE over turns, and inside each turn over its tokens towards the turn's return.

    With V_k the value before turn k's first token, A_k is GAE over turns and A_k + V_k what its
    tokens are to reach (arXiv:2504.20073).

    Args:
        token_level_rewards, values, response_mask, turn_ids: (batch, response_len).
        gamma, lam: discount and GAE's lambda per token, inside a turn.
        config: has turn_gamma and turn_lam, those per turn; None means 1.
        whiten: whether to whiten over all tokens of the batch; False leaves that to the caller.
    Returns:
        advantages, returns = advantages before whitening + values: (batch, response_len), zero
        where the mask is zero.
    """
    turn_gamma = 1.0 if config is None else config.turn_gamma
    turn_lam = 1.0 if config is None else config.turn_lam
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    rewards, values = at_least_float32(token_level_rewards, values)
    exists = turns.exists  # (batch, turns)

    response_len = values.shape[1]
    if response_len == 0:
        return torch.zeros_like(values), torch.zeros_like(values)
    first = turns.first(without=response_len).clamp(max=response_len - 1)
    values_before = values.gather(1, first)  # (batch, turns)
    _, targets = gae_scan(
        turns.rewards,
        values_before,
        exists,
        None,
        gamma=turn_gamma,
        lam=turn_lam,
    )  # (batch, turns)

    # What comes after the turn is credited to its last token, where the scan over tokens ends.
    rows = exists.nonzero()[:, 0]
    last_tokens = (rows, turns.last[exists])
    after_turn = (targets - turns.rewards)[exists]
    rewards = rewards.index_put(last_tokens, after_turn, accumulate=True)
    false = torch.tensor(False, device=values.device)
    continues = torch.ones_like(turns.sampled).index_put_(last_tokens, false)
    advantages, returns = gae_scan(rewards, values, turns.sampled, continues, gamma=gamma, lam=lam)
    if whiten:
        advantages = masked_whiten(advantages, turns.sampled)
    return advantages, returns


@register_adv_est(
    "turn_return",
    span="groups",
    formula="turn's return - mean return of that turn in the group's other episodes",
    compares="turns",
    ordered=False,
)
@torch.no_grad()
def compute_turn_return_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    config: Any = None,
    leave_one_out: bool = True,
) -> Advantages:
    """Subtracts from each turn's return the mean return of turn k in the group's other episodes.

    A_{i,k} = G_{i,k} - mean(G_{j,k}, j != i that reached turn k), with
    G_{i,k} = sum_{l >= k} turn_gamma^(l-k) r_{i,l}; nothing is subtracted where no other episode
    reached it. That is unbiased, though policies decide how long episodes are: what others do does
    not depend on this one.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        config: has turn_gamma; None means 1.
        leave_one_out: False includes the episode itself in the mean, which scales turn k by
            m / (m + 1), where m others reached it.
    Returns:
        advantages, returns (G, of each token's turn): (batch, response_len), zero where the mask
        is zero.
    """
    turn_gamma = 1.0 if config is None else config.turn_gamma
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    returns = discounted_returns(turns.rewards, turns.exists, turn_gamma)  # (batch, turns)

    # Entry (i, k) belongs to turn k of episode i's group.
    number_of_turns = returns.shape[1]
    turn = torch.arange(number_of_turns, device=returns.device)
    ids = consecutive_ids(index, returns.device)[:, None] * number_of_turns + turn
    groups = Groups(ids.flatten(), valid=turns.exists.flatten())
    advantages = groups.deviation(returns.flatten().double())
    if leave_one_out:
        # G_i - (sum - G_i) / (m - 1) = (G_i - mean) m / (m - 1)
        others = (groups.size - 1).clamp(min=1)
        leave_one_out_advantages = advantages * groups.size / others
        alone = groups.size == 1
        advantages = torch.where(alone, returns.flatten(), leave_one_out_advantages)
    return turns.spread(advantages.view_as(returns)), turns.spread(returns)


@register_adv_est(
    "gigpo",
    span="groups",
    formula="GRPO's of the episode + weight x comparison among turns that began in the same state",
    compares="states",
    ordered=False,
)
@torch.no_grad()
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
    """Adds to GRPO's advantage of the episode one of each turn among those from the same state.

    A = A_episode + gigpo_step_weight * A_turn; A_turn compares the turn's discounted return with
    those of the group's turns, of any number and episode, whose anchor is the same: GiGPO
    (arXiv:2505.10978, eq. 6 to 8). The turn's part is 0 where a state was met once.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        anchors: for each episode the state that each of its turns began in.
        epsilon: what is added to a standard deviation that is divided by.
        norm_adv_by_std_in_grpo: whether to divide both parts by their standard deviation.
        config: has turn_gamma and gigpo_step_weight; None means 1.
    Returns:
        advantages, returns (the turn's discounted one): (batch, response_len), zero where the mask
        is zero.
    Raises:
        ValueError: an episode has more turns than anchors.
    """
    turn_gamma = 1.0 if config is None else config.turn_gamma
    step_weight = 1.0 if config is None else config.gigpo_step_weight
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    returns = discounted_returns(turns.rewards, turns.exists, turn_gamma)  # (batch, turns)

    # The T turns that were played: episode and turn number of each.
    played = turns.exists.nonzero(as_tuple=True)
    same_state = _turns_by_state(played, index, anchors)
    turn_advantages = same_state.deviation(returns[played].double())  # (T,)
    if norm_adv_by_std_in_grpo:
        turn_advantages = turn_advantages / (same_state.std(turn_advantages) + epsilon)
    turn_part = torch.zeros_like(returns).index_put(played, turn_advantages.to(returns.dtype))

    episode_part, _ = compute_grpo_outcome_advantage(
        token_level_rewards,
        response_mask,
        index,
        epsilon=epsilon,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
    )
    advantages = episode_part + step_weight * turns.spread(turn_part)
    return advantages, turns.spread(returns)


def _turns_by_state(
    played: tuple[Tensor, Tensor], index: np.ndarray, anchors: Sequence[Sequence[str]]
) -> Groups:
    """Groups the T turns that were played by their episode's group and the state they began in.

    Args:
        played: the episode and the number of each turn, (T,) int64 each.
        index, anchors: as of `compute_gigpo_advantage`.
    """
    episodes, numbers = played
    device = episodes.device
    anchors_of_episode = torch.tensor(
        [len(states) for states in anchors], dtype=torch.int64, device=device
    )
    if bool((numbers >= anchors_of_episode[episodes]).any()):
        raise ValueError(
            f"gigpo: {len(episodes)} turns were played, "
            f"and anchors name {int(anchors_of_episode.sum())}"
        )
    # All episodes' anchors in one list, in which an episode's begin at its offset.
    offsets = anchors_of_episode.cumsum(0) - anchors_of_episode
    state_ids = consecutive_ids(list(chain.from_iterable(anchors)), device)
    states = state_ids[offsets[episodes] + numbers]  # (T,)
    number_of_states = int(states.max()) + 1 if len(states) else 1
    group_and_state = consecutive_ids(index, device)[episodes] * number_of_states + states
    _, ids = torch.unique(group_and_state, return_inverse=True)
    return Groups(ids, valid=torch.ones_like(ids, dtype=torch.bool))
