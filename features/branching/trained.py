"""Weighs continuations that are trained on, and packs their rows (branching.train=true).

    an episode, branched at turn 1     P  A0 E0  A1 E1  A2     its row, as ever
    a continuation of turn 1           P  A0 E0  B1 F1         mask 1 on B1 alone
    weights of turns, two of them      vine       1  1/3  1/3  for the episode, 1/3 for each of them
                                       tree_grpo  likewise

An episode and its continuations are drawn from the same policy, so that each of those that may
reach a turn gives the same expected gradient there; weights that add up to 1 at every turn keep it.
What a continuation is compared with are the others of its state, the episode among them. Invariant:
weights follow from where continuations begin and from how many count, never from what they earned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from features.branching.measured import counts, discounted, turn_rewards
from training.config import AgentConfig
from training.core_algos.branch_advantages import tree_weights
from workers.rollout.episode import Episode, Row

# The column of the batch that holds the continuations of each row's episode.
BRANCH_ROWS = "branch_rows"
TREE = "tree_grpo"


@dataclass(frozen=True)
class PackedBranchRow:
    """Holds a row of a continuation.

    Attributes:
        prompt_ids, ids: int32.
        log_probs: float32 nats, 0 on what nobody sampled.
        turn_ids: int16, the turn of each token that is trained on, -1 elsewhere.
        rewards: float32, of each token of `ids`.
    """

    prompt_ids: np.ndarray
    ids: np.ndarray
    log_probs: np.ndarray
    turn_ids: np.ndarray
    rewards: np.ndarray


@dataclass(frozen=True)
class TrainedBranch:
    """Holds a continuation that is trained on.

    Attributes:
        word: its name within its episode.
        returns: as in the column `branch_returns`: those of the others of its state.
        weights: as in the column `turn_weights`.
        rows: those with tokens that are trained on.
        sequence_tokens: of the episode up to it, and its own.
    """

    word: str
    returns: list[list[float]]
    weights: list[float]
    rows: list[PackedBranchRow]
    sequence_tokens: int


@dataclass(frozen=True)
class Counted:
    """Holds an episode's continuations that count, and where more would have begun.

    Attributes:
        episode: that they are of.
        by_turn: of each of its turns, its continuations.
        numbered: the turns at which the settings have some begin; None: at every turn.
        first: the first turn that is continued from.
        samples: that are asked for at each.
    """

    episode: Episode
    by_turn: list[list[Episode]]
    numbered: Sequence[int] | None
    first: int
    samples: int

    def begun_at(self, turn: int) -> int:
        """Counts the continuations of a turn; of one that was not played, how many there would be.

        A continuation may be longer than its episode. What it is weighed with must not depend on
        how long the episode was.
        """
        if turn < len(self.by_turn):
            return len(self.by_turn[turn])
        is_named = self.numbered is None or turn in self.numbered
        return self.samples if is_named and turn >= self.first else 0

    def weights(self, turns: int, tree: bool, begun: int | None = None) -> list[float]:
        """Weighs the first turns of the episode, or of a continuation.

        Args:
            turns: how many.
            tree: by the product of 1/b along the path; else by 1 / (sequences that may reach a
                turn).
            begun: the turn at which the continuation began; None: it is the episode.
        """
        at = [self.begun_at(turn) for turn in range(turns)]
        if tree:
            # Behind its first turn a continuation is branched no further.
            on_path = [1 + n if begun is None or j <= begun else 1 for j, n in enumerate(at)]
            return tree_weights(on_path)
        return (1 / (1 + np.cumsum(np.asarray(at, dtype=np.int64)))).tolist()


def counted_branches(
    episode: Episode,
    agent: AgentConfig,
    samples: int,
    *,
    numbered: Sequence[int] | None = None,
    first: int = 0,
) -> Counted:
    """Finds the continuations of an episode that count, by the turn at which they began."""
    by_turn: list[list[Episode]] = [[] for _ in episode.turns]
    for branch in episode.branches:
        assert branch.begin is not None
        if counts(branch, agent):
            by_turn[branch.begin.turn].append(branch)
    return Counted(episode, by_turn, numbered, first, samples)


def trained_branches(found: Counted, estimator: str, turn_gamma: float) -> list[TrainedBranch]:
    """Makes what is trained on of an episode's continuations."""
    own = own_values(found, estimator, turn_gamma)
    trained = []
    for turn, branches in enumerate(found.by_turn):
        earned = [_earned(branch, turn, turn_gamma) for branch in branches]
        for number, branch in enumerate(branches):
            others = [own[turn], *earned[:number], *earned[number + 1 :]]
            begin = branch.begin
            assert begin is not None
            turns = len(branch.turns)
            returns: list[list[float]] = [[] for _ in range(turns)]
            if turn < turns:
                returns[turn] = others
            rows = [packed(branch, row) for row in branch.rows]
            trained.append(
                TrainedBranch(
                    word=begin.word,
                    returns=returns,
                    weights=found.weights(turns, estimator == TREE, begun=turn),
                    rows=[row for row in rows if (row.turn_ids >= 0).any()],
                    sequence_tokens=sum(
                        span.end - span.start
                        for row in branch.rows
                        for span in row.spans
                        if not branch.is_left_out(span)
                    ),
                )
            )
    return trained


def own_values(found: Counted, estimator: str, turn_gamma: float) -> list[float]:
    """Returns what the episode itself tells of the state that each of its turns began in.

    That is its return; for tree_grpo its q, in which a later state that has continuations counts as
    the mean of all that go on from there.
    """
    values: list[float] = []
    after = 0.0
    rewards = turn_rewards(found.episode)
    for turn in reversed(range(len(rewards))):
        own = rewards[turn] + turn_gamma * after
        values.append(own)
        after = own
        branches = found.by_turn[turn]
        if estimator == TREE and branches:
            earned = [_earned(branch, turn, turn_gamma) for branch in branches]
            after = (own + sum(earned)) / (1 + len(earned))
    return values[::-1]


def _earned(branch: Episode, turn: int, turn_gamma: float) -> float:
    return discounted(turn_rewards(branch)[turn:], turn_gamma)


def packed(branch: Episode, row: Row) -> PackedBranchRow:
    """Packs a row of a continuation, of which the turns before it are not trained on again."""
    assert branch.begin is not None
    turn_ids = np.full(len(row.ids), -1, np.int16)
    rewards = np.zeros(len(row.ids), np.float32)
    for span in row.spans:
        if span.turn >= branch.begin.turn and not branch.is_left_out(span):
            turn_ids[span.start : span.end] = span.turn
    for place, reward in row.reward_at.items():
        if turn_ids[place] >= 0:
            rewards[place] = reward
    return PackedBranchRow(
        prompt_ids=np.asarray(row.prompt_ids, np.int32),
        ids=np.asarray(row.ids, np.int32),
        log_probs=np.asarray(row.log_probs, np.float32),
        turn_ids=turn_ids,
        rewards=rewards,
    )
