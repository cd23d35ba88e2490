"""Enumerates the continuations of the bias table's MDP: who is trained on, beside which returns.

A row is an episode with the returns of the continuations that an estimator compares its turns with.
Rows are listed with their expected number in a sample of one main episode, so that what is
trained on beside it, continuations and branches of a tree, are further rows. Invariant: everything
is exact; rows that are alike are one.

    row    episode       its tokens, those before `first_turn` being another row's
           returns       of each turn those of continuations, or of other branches
           weights       of each turn what its advantage is multiplied by
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from scripts.bias_mdp import (
    EPISODES,
    GO,
    STATES,
    STOP,
    TURNS,
    WORLD,
    Episode,
    Groups,
    policies_after,
)
from training.core_algos import drawn_turn_weights, trained_continuation_weights, tree_weights

# Returns of one turn's continuations, in rising order.
Returns = tuple[float, ...]
Lists = tuple[Returns, ...]


@dataclass(frozen=True)
class Row:
    """Names a row: an episode, what its turns are compared with, and what they weigh."""

    episode: int
    returns: Lists
    weights: tuple[float, ...]
    first_turn: int = 0


@dataclass(frozen=True)
class BranchedGroups(Groups):
    """Holds rows as groups of one, whose probabilities are their expected numbers.

    Attributes:
        trained: (rows, WIDTH) bool, the tokens that are the row's own.
        branch_returns, turn_weights: of each row and turn.
    """

    trained: Tensor
    branch_returns: list[Lists]
    turn_weights: list[tuple[float, ...]]

    @classmethod
    def of(cls, numbers: Mapping[Row, float]) -> BranchedGroups:
        """Lists rows with their expected numbers."""
        rows = list(numbers)
        episodes = torch.tensor([row.episode for row in rows])
        first = torch.tensor([row.first_turn for row in rows])
        return cls(
            rows=episodes,
            probabilities=torch.tensor(list(numbers.values()), dtype=torch.float64),
            size=1,
            trained=WORLD.mask[episodes] & (WORLD.turn_ids[episodes] >= first[:, None]),
            branch_returns=[row.returns for row in rows],
            turn_weights=[row.weights for row in rows],
        )


# Episodes


@cache
def chances() -> tuple[float, ...]:
    """Returns the chance of each episode under the policy that samples."""
    return tuple(WORLD.probabilities(policies_after(0).sampler).tolist())


def return_from(episode: Episode, turn: int) -> float:
    """Adds up an episode's rewards from a turn on."""
    return round(sum(episode.rewards[turn:]), 9)


def before(episode: Episode, turn: int) -> tuple[int, ...]:
    """Returns the tokens before a turn: they say which state it begins in."""
    return tuple(
        token for token, of in zip(episode.tokens, episode.turns, strict=True) if of < turn
    )


@cache
def continuations(beginning: tuple[int, ...], turn: int) -> dict[float, float]:
    """Returns the chance of each return of a continuation from a state.

    Args:
        beginning: the tokens before `turn`.
    """
    found: defaultdict[float, float] = defaultdict(float)
    for episode, chance in zip(EPISODES, chances(), strict=True):
        if len(episode.rewards) > turn and before(episode, turn) == beginning:
            found[return_from(episode, turn)] += chance
    total = sum(found.values())
    return {value: chance / total for value, chance in found.items()}


@cache
def several(beginning: tuple[int, ...], turn: int, samples: int) -> dict[Returns, float]:
    """Returns the chance of each set of `samples` continuations' returns from a state."""
    found: defaultdict[Returns, float] = defaultdict(float)
    for drawn in itertools.product(continuations(beginning, turn).items(), repeat=samples):
        chance = 1.0
        for _, of_one in drawn:
            chance *= of_one
        found[tuple(sorted(value for value, _ in drawn))] += chance
    return dict(found)


def branched(episode: Episode, turns: Sequence[int], samples: int) -> Iterator[tuple[Lists, float]]:
    """Yields what continuations of some turns of an episode may earn, with its chance."""
    per_turn: list[dict[Returns, float]] = []
    for turn in range(len(episode.rewards)):
        if turn in turns:
            per_turn.append(several(before(episode, turn), turn, samples))
        else:
            per_turn.append({(): 1.0})
    for drawn in itertools.product(*[each.items() for each in per_turn]):
        chance = 1.0
        for _, of_turn in drawn:
            chance *= of_turn
        yield tuple(returns for returns, _ in drawn), chance


# Ways to sample


def vine(samples: int = 1, own: bool = False) -> BranchedGroups:
    """Continues every turn's state.

    Args:
        own: whether the episode's own return is taken for one more continuation.
    """
    numbers: defaultdict[Row, float] = defaultdict(float)
    for number, (episode, chance) in enumerate(zip(EPISODES, chances(), strict=True)):
        length = len(episode.rewards)
        for returns, of_returns in branched(episode, range(length), samples):
            if own:
                returns = tuple(
                    (*each, return_from(episode, turn)) for turn, each in enumerate(returns)
                )
            numbers[Row(number, returns, (1.0,) * length)] += chance * of_returns
    return BranchedGroups.of(numbers)


def drawn_turn(weighted: bool) -> BranchedGroups:
    """Continues the states before and behind one turn, drawn evenly from the episode's."""
    numbers: defaultdict[Row, float] = defaultdict(float)
    for number, (episode, chance) in enumerate(zip(EPISODES, chances(), strict=True)):
        length = len(episode.rewards)
        for turn in range(length):
            weights = drawn_turn_weights(length, turn)
            if not weighted:
                weights = [float(weight > 0) for weight in weights]
            for returns, of_returns in branched(episode, (turn, turn + 1), samples=1):
                row = Row(number, returns, tuple(weights))
                numbers[row] += chance * of_returns / length
    return BranchedGroups.of(numbers)


def trained_continuations(weighted: bool, samples: int = 2) -> BranchedGroups:
    """Continues every turn's state, and trains on the continuations beside each other too."""
    weights = tuple(trained_continuation_weights([True] * TURNS, samples))
    if not weighted:
        weights = (1.0,) * TURNS
    numbers: defaultdict[Row, float] = defaultdict(float)
    for number, (episode, chance) in enumerate(zip(EPISODES, chances(), strict=True)):
        length = len(episode.rewards)
        for returns, of_returns in branched(episode, range(length), samples):
            numbers[Row(number, returns, weights[:length])] += chance * of_returns
        for turn in range(length):
            # This episode as a continuation from one of its turns, compared with the others there.
            others = several(before(episode, turn), turn, samples - 1)
            for returns_of_others, of_others in others.items():
                lists = [()] * turn + [returns_of_others] + [()] * (length - turn - 1)
                row = Row(number, tuple(lists), weights[:length], first_turn=turn)
                numbers[row] += samples * chance * of_others
    return BranchedGroups.of(numbers)


def tree(weighted: bool) -> BranchedGroups:
    """Grows two branches from the start, and two from the state behind the first turn of each."""
    numbers: defaultdict[Row, float] = defaultdict(float)
    for number, (episode, chance) in enumerate(zip(EPISODES, chances(), strict=True)):
        length = len(episode.rewards)
        branches = [1, 2, 1][:length]
        weights = tuple(tree_weights(branches) if weighted else [0.5] * length)
        siblings = branched(episode, (1,), samples=1)
        for (returns, of_returns), (value, of_value) in itertools.product(
            siblings, branch_values().items()
        ):
            row = Row(number, ((value,), *returns[1:]), weights)
            numbers[row] += chance * of_returns * of_value
            if length > 1:
                # The other branch of the first turn's state: alike, and itself trained on.
                numbers[Row(number, ((), *returns[1:]), weights, first_turn=1)] += (
                    chance * of_returns * of_value
                )
    return BranchedGroups.of(numbers)


def branch_values() -> dict[float, float]:
    """Returns the chance of each value of a branch from the start, of two branches behind it."""
    found: defaultdict[float, float] = defaultdict(float)
    for episode, chance in zip(EPISODES, chances(), strict=True):
        own = episode.rewards[0]
        if len(episode.rewards) == 1:
            found[round(own, 9)] += chance
            continue
        for value, of_value in continuations(before(episode, 1), 1).items():
            found[round(own + (return_from(episode, 1) + value) / 2, 9)] += chance * of_value
    return dict(found)


def redraw() -> BranchedGroups:
    """Draws every turn anew once, each time with the episode's own seeds for the later turns.

    A seed is a number from 0 to 1 for each token: the first token's chance is what it is below. All
    that matters of it is between which chances of the policy's states it is.
    """
    numbers: defaultdict[Row, float] = defaultdict(float)
    for seeds, chance in all_seeds(range(TURNS)):
        number = played(seeds)
        episode = EPISODES[number]
        length = len(episode.rewards)
        per_turn: list[dict[float, float]] = []
        for turn in range(length):
            found: defaultdict[float, float] = defaultdict(float)
            for anew, of_seeds in all_seeds((turn,)):
                other = EPISODES[played({**seeds, **anew})]
                found[return_from(other, turn)] += of_seeds
            per_turn.append(dict(found))
        for drawn in itertools.product(*[each.items() for each in per_turn]):
            together = chance
            for _, of_turn in drawn:
                together *= of_turn
            row = Row(number, tuple((value,) for value, _ in drawn), (1.0,) * length)
            numbers[row] += together
    return BranchedGroups.of(numbers)


# (turn, place in the turn) -> a number from 0 to 1.
Seeds = dict[tuple[int, int], float]


@cache
def first_token_chances() -> list[float]:
    """Returns the chance of token 0 in each context."""
    return [float(chance) for chance in policies_after(0).sampler.softmax(-1)[:, 0]]


def all_seeds(turns: Sequence[int]) -> Iterator[tuple[Seeds, float]]:
    """Yields one seed out of every stretch between two chances, for all tokens of some turns."""
    chances_of_first = first_token_chances()
    places = [(turn, place) for turn in turns for place in range(2)]
    stretches = []
    for turn, place in places:
        states = range(1) if turn == 0 else range(1, len(STATES))
        bounds = sorted({0.0, 1.0, *(chances_of_first[2 * state + place] for state in states)})
        stretches.append(list(itertools.pairwise(bounds)))
    for chosen in itertools.product(*stretches):
        chance = 1.0
        for low, high in chosen:
            chance *= high - low
        middles = [(low + high) / 2 for low, high in chosen]
        yield dict(zip(places, middles, strict=True)), chance


def played(seeds: Seeds) -> int:
    """Returns the number of the episode that seeds give."""
    chances_of_first = first_token_chances()
    tokens: list[int] = []
    state = 0
    for turn in range(TURNS):
        token = int(seeds[turn, 0] >= chances_of_first[2 * state])
        tokens.append(token)
        if token == STOP:
            break
        assert token == GO
        kind = int(seeds[turn, 1] >= chances_of_first[2 * state + 1])
        tokens.append(kind)
        state = 1 + kind
    return [episode.tokens for episode in EPISODES].index(tuple(tokens))


@dataclass(frozen=True)
class Way:
    """Says how branches are sampled and trained on.

    Attributes:
        estimator: of the project.
        rows: makes the rows that it sees.
        divide_by_std: an argument of tree_grpo, which the config does not set.
    """

    estimator: str
    rows: Callable[[], BranchedGroups]
    divide_by_std: bool = False


# The rows of the whole table: those of the estimators as they are.
BRANCHED: dict[str, Callable[[], BranchedGroups]] = {
    "vine": cache(vine),
    "vine_redraw": cache(redraw),
    "tree_grpo": cache(lambda: tree(weighted=True)),
}
UNBIASED_WAYS = {
    "vine, 1 continuation of each turn": Way("vine", BRANCHED["vine"]),
    "vine, 2 continuations": Way("vine", lambda: vine(2)),
    "vine, one drawn turn": Way("vine", lambda: drawn_turn(weighted=True)),
    "vine, 2 continuations, trained on": Way("vine", lambda: trained_continuations(weighted=True)),
    "vine_redraw, 1 redraw of each turn": Way("vine_redraw", BRANCHED["vine_redraw"]),
    "tree_grpo, 2 branches at turns 0 and 1": Way("tree_grpo", BRANCHED["tree_grpo"]),
}
BIASED_WAYS = {
    "vine, 1 continuation and the own return": Way("vine", lambda: vine(1, own=True)),
    "vine, 2 continuations and the own return": Way("vine", lambda: vine(2, own=True)),
    "vine, one drawn turn, unweighted": Way("vine", lambda: drawn_turn(weighted=False)),
    "vine, 2 continuations, trained on, unweighted": Way(
        "vine", lambda: trained_continuations(weighted=False)
    ),
    "tree_grpo, each token once, unweighted": Way("tree_grpo", lambda: tree(weighted=False)),
    "tree_grpo, divided by the siblings' std": Way(
        "tree_grpo", BRANCHED["tree_grpo"], divide_by_std=True
    ),
    "tree_grpo, both": Way("tree_grpo", lambda: tree(weighted=False), divide_by_std=True),
}
