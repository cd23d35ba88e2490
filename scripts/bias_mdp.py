"""Enumerates a small MDP of several turns for the bias table: episodes, policies, groups.

A turn is `stop`, which ends the episode, `go end` (short) or `go more` (long); three turns at most.
What the policy sees is the kind of the last turn and its place in this one, which makes six
softmaxes of two tokens. Invariant: everything is float64 and exact, with nothing sampled.

Tokens and contexts of the episode that plays `go more` and then `stop`:

    tokens     1  1  0      go more stop
    contexts   0  1  4      start, start after go, long
    turns      0  0  1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

# Turns of an episode at most, and its tokens then.
TURNS = 3
WIDTH = 6
# Episodes of a group.
GROUP = 4
# The kind of the turn before; each has two contexts, a turn's first token and its second.
STATES = ("start", "short", "long")
CONTEXTS = 2 * len(STATES)
TOKENS = 2
# The first token of a turn.
STOP = 0
GO = 1
# The pay of a turn: kind -> state -> reward.
PAYS = {
    "short": {"start": 0.2, "short": 0.1, "long": 0.7},
    "long": {"start": 0.6, "short": 0.3, "long": -0.2},
}
# The size of an update, in logits.
STEP = 0.25


@dataclass(frozen=True)
class Episode:
    """Holds one way to play.

    Attributes:
        contexts: of each token, the softmax that it is drawn from.
        tokens: 0 or 1 each.
        turns: of each token, the number of its turn.
        rewards: of each turn.
        states: of each turn, the kind of the one before.
    """

    contexts: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    turns: tuple[int, ...] = ()
    rewards: tuple[float, ...] = ()
    states: tuple[str, ...] = ()

    def followed_by(self, later: Episode) -> Episode:
        """Joins two parts of an episode."""
        return Episode(
            contexts=self.contexts + later.contexts,
            tokens=self.tokens + later.tokens,
            turns=self.turns + later.turns,
            rewards=self.rewards + later.rewards,
            states=self.states + later.states,
        )


def turn_reward(state: str, kind: str, kinds_before: tuple[str, ...], *, is_last: bool) -> float:
    """Pays a turn that goes on; an episode that had both kinds of turns ends with 1 more."""
    reward = PAYS[kind][state]
    had_both = len({*kinds_before, kind}) == 2
    if is_last and had_both:
        reward += 1.0
    return reward


def play(
    turn: int = 0, state: str = "start", kinds_before: tuple[str, ...] = ()
) -> Iterator[Episode]:
    """Yields every episode from here on."""
    first_context = 2 * STATES.index(state)
    yield Episode((first_context,), (STOP,), (turn,), (0.0,), (state,))
    is_last = turn + 1 == TURNS
    for token, kind in enumerate(("short", "long")):
        reward = turn_reward(state, kind, kinds_before, is_last=is_last)
        this_turn = Episode(
            contexts=(first_context, first_context + 1),
            tokens=(GO, token),
            turns=(turn, turn),
            rewards=(reward,),
            states=(state,),
        )
        if is_last:
            yield this_turn
            continue
        for later in play(turn + 1, kind, (*kinds_before, kind)):
            yield this_turn.followed_by(later)


EPISODES = list(play())


@dataclass(frozen=True)
class World:
    """Holds all episodes as tensors, (episodes, WIDTH); a turn's reward is on its last token."""

    contexts: Tensor
    tokens: Tensor
    mask: Tensor
    turn_ids: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, episodes: list[Episode]) -> World:
        """Pads the episodes."""
        turn_ids = _padded([episode.turns for episode in episodes], fill=-1)
        rewards = torch.zeros(turn_ids.shape, dtype=torch.float64)
        for row, episode in enumerate(episodes):
            for turn, reward in enumerate(episode.rewards):
                last_token = max(i for i, of in enumerate(episode.turns) if of == turn)
                rewards[row, last_token] = reward
        return cls(
            contexts=_padded([episode.contexts for episode in episodes], fill=0),
            tokens=_padded([episode.tokens for episode in episodes], fill=0),
            mask=turn_ids >= 0,
            turn_ids=turn_ids,
            rewards=rewards,
        )

    def log_probs(self, logits: Tensor) -> Tensor:
        """Takes the tokens' log-probs, 0 outside the mask: (episodes, WIDTH)."""
        return logits.log_softmax(-1)[self.contexts, self.tokens] * self.mask

    def probabilities(self, logits: Tensor) -> Tensor:
        """Takes the episodes' probabilities: (episodes,)."""
        return self.log_probs(logits).sum(-1).exp()

    def expected(self, logits: Tensor, returns: Tensor | None = None) -> Tensor:
        """Differentiates the expected return exactly by the logits.

        Args:
            logits: (CONTEXTS, TOKENS), of the policy.
            returns: (episodes, WIDTH), of each token on; None = the episode's reward.
        Returns:
            (CONTEXTS, TOKENS).
        """
        leaf = logits.clone().requires_grad_()
        probabilities = self.probabilities(logits)
        if returns is None:
            returns = self.rewards.sum(-1, keepdim=True)
        (probabilities[:, None] * self.log_probs(leaf) * returns).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    def values(self, logits: Tensor) -> Tensor:
        """Computes what an exact critic says, (episodes, WIDTH).

        It is what is still to come, averaged over the episodes that began alike.
        """
        probabilities = self.probabilities(logits)
        to_come = self.rewards.flip(1).cumsum(1).flip(1)
        values = torch.zeros_like(to_come)
        for row, column in self.mask.nonzero().tolist():
            began_alike = (self.tokens[:, :column] == self.tokens[row, :column]).all(1)
            alike = began_alike & self.mask[:, column]
            expected = (probabilities * to_come[:, column])[alike].sum()
            values[row, column] = expected / probabilities[alike].sum()
        return values


def _padded(rows: list[tuple[int, ...]], fill: int) -> Tensor:
    """Pads rows on the right: (rows, WIDTH)."""
    return torch.tensor([[*row, *[fill] * (WIDTH - len(row))] for row in rows])


WORLD = World.of(EPISODES)


@dataclass(frozen=True)
class Policies:
    """Holds who sampled, who is updated, and who teaches: logits, (CONTEXTS, TOKENS) each."""

    sampler: Tensor
    updated: Tensor
    teacher: Tensor


@cache
def policies_after(updates: int) -> Policies:
    """Makes the policies; the updated one is so many true gradient steps from the sampler."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, CONTEXTS, TOKENS)
    sampler, teacher = torch.randn(shape, generator=generator, dtype=torch.float64)
    updated = sampler
    for _ in range(updates):
        gradient = WORLD.expected(updated)
        updated = updated + STEP * gradient / gradient.norm()
    return Policies(sampler, updated, teacher)


@dataclass(frozen=True)
class Groups:
    """Holds groups of `size` episodes; each order of the same ones is the same group.

    Attributes:
        rows: (groups * size,) int64, the episode of each row.
        probabilities: (groups,) of the group, in any order.
    """

    rows: Tensor
    probabilities: Tensor
    size: int

    @classmethod
    def every(cls, sampler: Tensor, size: int = GROUP) -> Groups:
        """Lists all groups there are."""
        groups = list(itertools.combinations_with_replacement(range(len(EPISODES)), size))
        orders = torch.tensor([_orders(group) for group in groups], dtype=torch.float64)
        rows = torch.tensor(groups)
        probabilities = WORLD.probabilities(sampler)[rows].prod(-1) * orders
        return cls(rows.flatten(), probabilities, size)

    def only(self, numbers: list[int]) -> Groups:
        """Keeps some of the groups."""
        rows = self.rows.view(-1, self.size)[numbers]
        return Groups(rows.flatten(), self.probabilities[numbers], self.size)

    @property
    def index(self) -> np.ndarray:
        """Numbers the group of each row."""
        return np.repeat(np.arange(len(self.probabilities)), self.size)


def _orders(group: tuple[int, ...]) -> float:
    """Counts the orders in which the members of a group can stand."""
    repeats = [math.factorial(group.count(member)) for member in set(group)]
    return math.factorial(len(group)) / math.prod(repeats)


GROUPS = Groups.every(policies_after(0).sampler)
