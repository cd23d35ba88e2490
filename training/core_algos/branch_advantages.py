"""Advantage estimators that compare a turn with continuations: what would have happened from there.

A continuation goes on from the state that a turn of an episode began in; its return counts from
that turn on. `branch_returns` has of each episode and turn a list of them, empty where there are
none. Layout of an episode of three turns that was branched at turn 1:

    turn_ids        =   0   0  -1   1   1  -1   2   2
    branch_returns  = [[], [0.5, 1.5], []]
    segments        =  [turn 0)  [turns 1 and 2)       one begins at each branched turn

A continuation that is trained on is a row of its own, whose sampled tokens begin at the turn at
which it branched off; its list there has the returns of the others. Invariant: every estimator is
pure; returns and weights of turns that a row did not play change nothing; what is outside the mask
is zero. Numbers are float32, or float64 where the rewards are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.core_algos.groups import Groups, consecutive_ids
from training.core_algos.registry import Advantages, register_adv_est
from training.core_algos.token_advantages import discounted_returns
from training.core_algos.turn_advantages import Turns

# Of each episode, of each of its turns, the returns of continuations.
BranchReturns = Sequence[Sequence[Sequence[float]]]
# Of each episode, of each of its turns, its weight; None: 1 for all.
TurnWeights = Sequence[Sequence[float]] | None


@dataclass(frozen=True)
class Branches:
    """Holds what the continuations of each turn earned, (batch, turns) float64 each.

    Attributes:
        count: how many there are.
        mean: of their returns; 0 without one.
        squares: the sum of their squared distances to the mean.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, branch_returns: BranchReturns, turns: Turns) -> Branches:
        """Averages over the continuations of each turn that was played.

        Raises:
            ValueError: an episode has more turns than lists, or a return is not finite.
        """
        shape = turns.rewards.shape
        count, mean, squares = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        _require_turns("branch_returns", branch_returns, turns)
        for row, turn in turns.exists.nonzero().tolist():
            returns = branch_returns[row][turn]
            if not len(returns):
                continue
            if not all(isinstance(each, Real) and math.isfinite(each) for each in returns):
                raise ValueError(
                    f"branch_returns of turn {turn} of episode {row} are {list(returns)}; allowed: "
                    "finite numbers: leave out continuations that failed"
                )
            average = math.fsum(returns) / len(returns)
            count[row, turn] = len(returns)
            mean[row, turn] = average
            squares[row, turn] = math.fsum((each - average) ** 2 for each in returns)
        device = turns.rewards.device
        return cls(count.to(device), mean.to(device), squares.to(device))

    @property
    def exist(self) -> Tensor:
        """Returns which turns have a continuation: (batch, turns) bool."""
        return self.count > 0


def _require_turns(name: str, given: Sequence[Sequence[Any]], turns: Turns) -> None:
    """Raises ValueError where an episode has more turns than entries of `given`."""
    exists = turns.exists
    numbers = torch.arange(1, exists.shape[1] + 1, device=exists.device)
    played = (exists * numbers).amax(1).tolist() if exists.numel() else [0] * len(exists)
    if len(given) != len(played):
        raise ValueError(f"{name} has {len(given)} entries for {len(played)} episodes")
    for row, (entries, needed) in enumerate(zip(given, played, strict=True)):
        if len(entries) < needed:
            raise ValueError(
                f"{name} of episode {row} has {len(entries)} entries, and {needed} turns were "
                "played: give one for each turn"
            )


def _weighted(per_turn: Tensor, turns: Turns, turn_weights: TurnWeights) -> Tensor:
    """Spreads turns' numbers over their tokens, each times the weight of its turn.

    Args:
        per_turn: (batch, turns).
    Returns:
        (batch, response_len).
    """
    if turn_weights is not None:
        _require_turns("turn_weights", turn_weights, turns)
        weights = torch.zeros_like(per_turn)
        for row, turn in turns.exists.nonzero().tolist():
            weights[row, turn] = turn_weights[row][turn]
        per_turn = per_turn * weights
    return turns.spread(per_turn)


@dataclass(frozen=True)
class _Segments:
    """Holds the stretches of turns from one branched turn to the next, or to the end.

    Attributes:
        turns: of the batch.
        branches: of its turns.
        begins: (batch, turns) bool, where a segment begins: at a row's first turn, and at every
            turn that has continuations.
        is_root: (batch,) bool, rows whose first turn has no continuation to be compared with:
            their group is what they are compared with.
        first: (batch,) int64, each row's first turn; 0 of one that has none.
    """

    turns: Turns
    branches: Branches
    begins: Tensor
    is_root: Tensor
    first: Tensor

    @classmethod
    def of(cls, turns: Turns, branches: Branches) -> _Segments:
        """Finds where segments begin."""
        exists = turns.exists
        # The first of equal numbers.
        first = exists.int().argmax(1) if exists.numel() else exists.new_zeros(len(exists)).long()
        is_first = torch.zeros_like(exists).scatter(1, first[:, None], True) & exists
        has_branch = (is_first & branches.exist).any(1)
        return cls(
            turns=turns,
            branches=branches,
            begins=is_first | (branches.exist & exists),
            is_root=exists.any(1) & ~has_branch,
            first=first,
        )

    def totals(self, at_begin: Tensor, weight_of_own: Tensor, turn_gamma: float) -> Tensor:
        """Adds up each segment's rewards and what is told of the state that it ends in.

        A state's number is `at_begin` (1 - w) + w times the total of the segment that begins there.

        Args:
            at_begin: (batch, turns) of the state that a turn began in.
            weight_of_own: (batch, turns) w.
        Returns:
            (batch, turns) float64, of the segment that the turn is in from that turn on.
        """
        exists = self.turns.exists
        rewards = self.turns.rewards.double()
        totals = torch.zeros_like(rewards)
        after = torch.zeros_like(rewards[:, 0])
        for turn in reversed(range(rewards.shape[1])):
            total = rewards[:, turn] + turn_gamma * after
            totals[:, turn] = torch.where(exists[:, turn], total, 0)
            weight = weight_of_own[:, turn]
            told = (1 - weight) * at_begin[:, turn] + weight * total
            before = torch.where(self.begins[:, turn], told, total)
            after = torch.where(exists[:, turn], before, after)
        return totals

    def share(self, per_begin: Tensor) -> Tensor:
        """Gives every turn the number of the turn that its segment begins with: (batch, turns)."""
        shared = torch.zeros_like(per_begin)
        held = torch.zeros_like(per_begin[:, 0])
        for turn in range(per_begin.shape[1]):
            held = torch.where(self.begins[:, turn], per_begin[:, turn], held)
            shared[:, turn] = torch.where(self.turns.exists[:, turn], held, 0)
        return shared

    def of_first(self, per_turn: Tensor) -> Tensor:
        """Returns the number of each row's first turn: (batch,)."""
        return per_turn.gather(1, self.first[:, None]).squeeze(1)

    def at_first(self, per_row: Tensor, per_turn: Tensor) -> Tensor:
        """Puts a root's number in the place of its first turn's: (batch, turns)."""
        chosen = torch.where(self.is_root, per_row, self.of_first(per_turn))
        return per_turn.scatter(1, self.first[:, None], chosen[:, None])

    def roots(self, index: np.ndarray) -> Groups:
        """Groups the rows that are compared with their group."""
        return Groups(consecutive_ids(index, self.first.device), valid=self.is_root)


def _turn_gamma(config: Any) -> float:
    return 1.0 if config is None else float(config.turn_gamma)


def _mean_of_others(groups: Groups, per_row: Tensor) -> Tensor:
    """Averages over a row's group without the row itself, 0 where it is alone: (batch,)."""
    total = groups.sum(torch.where(groups.valid, per_row, 0))
    others = (groups.size - 1).clamp(min=1)
    return torch.where(groups.valid & (groups.size > 1), (total - per_row) / others, 0)


@register_adv_est(
    "vine",
    span="groups",
    formula="rewards up to the next branched turn + its continuations' mean return - this turn's",
    ordered=False,
)
@torch.no_grad()
def compute_vine_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    branch_returns: BranchReturns,
    turn_weights: TurnWeights = None,
    config: Any = None,
) -> Advantages:
    """Values states by fresh continuations, A_t = r_t + V(s_{t+1}) - V(s_t)  (arXiv:2410.01679).

    V is the mean return of the continuations alone, and 0 behind the end: the episode's own return
    among them would depend on the turn that is judged. From one branched turn to the next all turns
    share the advantage of their segment; where the first turn has no continuation, the group's
    other episodes are its continuations, and without those 0 is subtracted.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        index: (batch,) the group (uid) of each episode.
        branch_returns: of each episode and turn the returns of continuations from the turn's state,
            of the turn itself on, discounted by turn_gamma a turn; any number of them.
        turn_weights: of each episode and turn what its advantage is multiplied by (see
            `drawn_turn_weights`, `trained_continuation_weights`); None: 1.
        config: has turn_gamma; None means 1.
    Returns:
        advantages, returns (G, of each token's turn): (batch, response_len), zero where the mask
        is zero.
    Raises:
        ValueError: an episode has more turns than lists, or a return is not finite.
    """
    turn_gamma = _turn_gamma(config)
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    branches = Branches.of(branch_returns, turns)
    segments = _Segments.of(turns, branches)
    returns = discounted_returns(turns.rewards, turns.exists, turn_gamma)  # (batch, turns)
    others = _mean_of_others(segments.roots(index), segments.of_first(returns.double()))
    values = segments.at_first(others, branches.mean)  # (batch, turns)
    totals = segments.totals(values, torch.zeros_like(values), turn_gamma)
    advantages = segments.share(totals - values)
    return _weighted(advantages, turns, turn_weights), turns.spread(returns)


@register_adv_est(
    "vine_redraw",
    span="episodes",
    formula="turn's return - mean return where this turn alone is drawn anew",
    ordered=False,
)
@torch.no_grad()
def compute_vine_redraw_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    branch_returns: BranchReturns,
    turn_weights: TurnWeights = None,
    config: Any = None,
) -> Advantages:
    """Draws one turn anew, the later ones with the episode's seeds, A_t = G_t - mean_j G_t^(j).

    What the episode and a redraw have in common, their luck above all, cancels. An action that was
    drawn again needs no continuation: its return is the episode's own. A turn without a redraw is
    not trained on.

    Args:
        token_level_rewards, response_mask, turn_ids: (batch, response_len).
        branch_returns: of each episode and turn the returns of the redraws, of the turn itself on,
            discounted by turn_gamma a turn.
        turn_weights, config: as of `compute_vine_advantage`.
    Returns:
        advantages, returns (G, of each token's turn): (batch, response_len), zero where the mask
        is zero.
    Raises:
        ValueError: an episode has more turns than lists, or a return is not finite.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    branches = Branches.of(branch_returns, turns)
    returns = discounted_returns(turns.rewards, turns.exists, _turn_gamma(config))
    advantages = torch.where(branches.exist, returns.double() - branches.mean, 0)
    return _weighted(advantages, turns, turn_weights), turns.spread(returns)


@register_adv_est(
    "tree_grpo",
    span="groups",
    formula="value of the branch - mean value of the other branches of the same state",
    ordered=False,
)
@torch.no_grad()
def compute_tree_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    turn_ids: Tensor,
    branch_returns: BranchReturns,
    turn_weights: TurnWeights = None,
    config: Any = None,
    divide_by_std: bool = False,
    epsilon: float = 1e-6,
) -> Advantages:
    """Compares the branches of a state with each other, A = q - mean of the others' q.

    q of a branch is its own rewards up to the next branched turn, and the mean of its children's q
    there, the one that goes on in this row among them; all its turns share A (arXiv:2509.21240,
    which divides by the deviation and trains each token once: neither is the policy gradient). The
    siblings of a first turn without continuations are the group's other episodes.

    Args:
        token_level_rewards, response_mask, turn_ids, index: as of `compute_vine_advantage`.
        branch_returns: of each episode and turn the q of the other branches of the turn's state.
        turn_weights: of each episode and turn the product of 1/b along its path (`tree_weights`)
            where all branches are trained on; None: 1, where the main chain alone is.
        config: has turn_gamma; None means 1.
        divide_by_std: whether to divide by the deviation of all siblings' q, itself among them.
        epsilon: what is added to a deviation that is divided by.
    Returns:
        advantages, returns (q, of each token's turn): (batch, response_len), zero where the mask
        is zero.
    Raises:
        ValueError: an episode has more turns than lists, or a number is not finite.
    """
    turns = Turns.of(token_level_rewards, response_mask, turn_ids)
    branches = Branches.of(branch_returns, turns)
    segments = _Segments.of(turns, branches)
    weight_of_own = 1 / (branches.count + 1)
    q = segments.totals(branches.mean, weight_of_own, _turn_gamma(config))  # (batch, turns)
    roots = segments.roots(index)
    q_of_first = segments.of_first(q)
    others = segments.at_first(_mean_of_others(roots, q_of_first), branches.mean)
    advantages = q - others
    if divide_by_std:
        squares = branches.squares + advantages**2 * branches.count * weight_of_own
        std = (squares / branches.count.clamp(min=1)).sqrt()
        std = segments.at_first(roots.std(roots.deviation(q_of_first)), std)
        advantages = advantages / (std + epsilon)
    per_turn = segments.share(advantages)
    return _weighted(per_turn, turns, turn_weights), turns.spread(q)


def drawn_turn_weights(turns: int, drawn: int, chance: float | None = None) -> list[float]:
    """Weighs an episode of which one turn was drawn to be branched: 1 / chance there, else 0.

    The draw may depend on the whole episode, on its length for one, as long as its chance is known;
    without the weight short episodes count too much.

    Args:
        turns: of the episode.
        drawn: the number of the turn that was drawn, and is trained on alone.
        chance: of drawing it; None: all turns of the episode alike, which is 1 / turns.
    Raises:
        ValueError: the episode has no such turn, or the chance is no probability above 0.
    """
    if not 0 <= drawn < turns:
        raise ValueError(f"turn {drawn} was drawn of an episode of {turns} turns: 0 to {turns - 1}")
    if chance is None:
        chance = 1 / turns
    if not 0 < chance <= 1:
        raise ValueError(f"turn {drawn} was drawn with a chance of {chance}; allowed: above 0 to 1")
    return [1 / chance if turn == drawn else 0.0 for turn in range(turns)]


def tree_weights(branches: Sequence[int]) -> list[float]:
    """Weighs the turns of a row of a tree: each the product of 1/b over the states up to it.

    So the branches of a state weigh together what the one branch weighed that leads there, and
    every depth of the tree weighs 1.

    Args:
        branches: of each turn, b: how many branches its state has that are trained on, this one
            included; 1 where it is not branched.
    Raises:
        ValueError: a state has no branch.
    """
    if any(b < 1 for b in branches):
        raise ValueError(f"branches are {list(branches)}: a state has at least 1, the row's own")
    return np.cumprod([1 / b for b in branches]).tolist()


def trained_continuation_weights(is_branched: Sequence[bool], samples: int) -> list[float]:
    """Weighs the turns of an episode and of its continuations where both are trained on.

    Turn j is reached by the episode and by `samples` continuations of every branched turn up to j.
    Each of them gets the same part, so that all together weigh 1, as the episode alone did.

    Args:
        is_branched: of each turn, whether continuations begin at it.
        samples: continuations of each such turn.
    Raises:
        ValueError: `samples` is below 0.
    """
    if samples < 0:
        raise ValueError(f"samples={samples} must be 0 or more")
    reached = 1 + samples * np.cumsum(np.asarray(is_branched, dtype=np.int64))
    return (1 / reached).tolist()
