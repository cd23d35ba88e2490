"""Tries the court of features/branching where the truth is known: how often do intervals hold it?

The game is to guess a number from 1 to 3 in two tries, told higher or lower; a fixed policy plays
it. Every episode is enumerated, and every group of eight, so that the credit of a turn and the
statistics of an estimator over all groups there are, are exact. Courts are then sampled: 32 groups
of 8 episodes, 4 continuations of each turn's state.

    python scripts/court_coverage.py                 # 500 courts; prints the table of the docs
    python scripts/court_coverage.py --courts 50
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from training.core_algos import call_adv_estimator
from training.features import require_feature

require_feature("branching", "scripts/court_coverage.py")

from features.branching.agreement import (  # noqa: E402
    Agreement,
    AgreementStatistics,
    agreement,
    group_sums,
)
from features.branching.credit import BranchedEpisode, JudgedTurns  # noqa: E402

NUMBERS = (1, 2, 3)
TURNS = 2
GROUP = 8
GROUPS = 32
SAMPLES = 4
COURTS = 500
ESTIMATORS = ("grpo", "rloo", "turn_return", "gigpo")
EXACT = ("r", "slope", "mse", "token", "episode")
ORDER = ("mse", "r", "slope", "sign", "token", "episode")
# Those of the settings that the estimators read.
ALGORITHM = SimpleNamespace(
    gamma=1.0, turn_gamma=1.0, turn_lam=1.0, gigpo_step_weight=1.0, norm_adv_by_std_in_grpo=True
)


@dataclass(frozen=True)
class State:
    """Holds what the policy knows: the turn, and the lowest and highest number there may be."""

    turn: int = 0
    low: int = NUMBERS[0]
    high: int = NUMBERS[-1]

    def after(self, guess: int, number: int) -> State | None:
        """Returns the state behind a guess; None where the game is over."""
        if guess == number or self.turn + 1 == TURNS:
            return None
        low, high = self.low, self.high
        if guess < number:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
        return State(self.turn + 1, low, high)


@cache
def policy(state: State) -> tuple[float, ...]:
    """Returns the chance of each number: uneven, and another in every state."""
    seed = state.turn * 100 + state.low * 10 + state.high
    chances = np.exp(0.6 * np.random.default_rng(seed).normal(size=len(NUMBERS)))
    return tuple((chances / chances.sum()).tolist())


@cache
def value(state: State | None, number: int) -> float:
    """Computes the chance of guessing the number from a state on."""
    if state is None:
        return 0.0
    total = 0.0
    for guess, chance in zip(NUMBERS, policy(state), strict=True):
        total += chance * (float(guess == number) + value(state.after(guess, number), number))
    return total


@dataclass(frozen=True)
class Episode:
    """Holds one way to play: its chance, and each turn's state, reward and true credit."""

    chance: float
    states: tuple[State, ...]
    rewards: tuple[float, ...]
    credit: tuple[float, ...]


def episodes(number: int, before: Episode, state: State) -> Iterator[Episode]:
    """Yields every way to go on from a state."""
    for guess, chance in zip(NUMBERS, policy(state), strict=True):
        reward = float(guess == number)
        following = state.after(guess, number)
        credit = reward + value(following, number) - value(state, number)
        episode = Episode(
            chance=before.chance * chance,
            states=(*before.states, state),
            rewards=(*before.rewards, reward),
            credit=(*before.credit, credit),
        )
        if following is None:
            yield episode
        else:
            yield from episodes(number, episode, following)


@cache
def all_episodes(number: int) -> tuple[Episode, ...]:
    """Lists every episode of a number."""
    return tuple(episodes(number, Episode(1.0, (), (), ()), State()))


def estimate(name: str, played: Sequence[Episode], groups: np.ndarray) -> np.ndarray:
    """Runs an estimator of the project, a token a turn.

    Args:
        groups: (episodes,) the group of each.
    Returns:
        (turns,) of all episodes, one behind the other.
    """
    padding = (0.0,) * TURNS
    rewards = torch.tensor(
        [(episode.rewards + padding)[:TURNS] for episode in played], dtype=torch.float64
    )
    lengths = torch.tensor([len(episode.rewards) for episode in played])
    mask = (torch.arange(TURNS) < lengths[:, None]).long()
    advantages, _ = call_adv_estimator(
        name,
        token_level_rewards=rewards,
        response_mask=mask,
        turn_ids=torch.where(mask > 0, torch.arange(TURNS), -1),
        index=groups,
        anchors=[[str(state) for state in episode.states] for episode in played],
        config=ALGORITHM,
    )
    return advantages[mask.bool()].double().numpy()


def exactly_judged(played: Sequence[Episode], groups: np.ndarray) -> JudgedTurns:
    """Returns the episodes' turns with their true credit in the place of both halves."""
    lengths = [len(episode.rewards) for episode in played]
    credit = np.concatenate([episode.credit for episode in played])
    return JudgedTurns(
        group=np.repeat(groups, lengths),
        episode=np.repeat(np.arange(len(played)), lengths),
        turn=np.concatenate([np.arange(length) for length in lengths]),
        tokens=np.ones(len(credit), dtype=np.int64),
        first=credit,
        second=credit,
        group_names=tuple(map(str, range(int(groups.max()) + 1))),
        episode_names=tuple(map(str, range(len(played)))),
    )


@cache
def truth(name: str) -> dict[str, float]:
    """Computes an estimator's statistics over every group of every number, exactly."""
    played = []
    chances = []
    for number in NUMBERS:
        every = all_episodes(number)
        for group in itertools.combinations_with_replacement(range(len(every)), GROUP):
            played += [every[member] for member in group]
            chances.append(_chance(group, every))
    groups = np.repeat(np.arange(len(chances)), GROUP)
    sums = group_sums(estimate(name, played, groups), exactly_judged(played, groups))
    statistics = AgreementStatistics().values(np.array(chances) @ sums)
    return dict(zip(ORDER, statistics.tolist(), strict=True))


def _chance(group: tuple[int, ...], every: Sequence[Episode]) -> float:
    """Returns the chance of a group's episodes, in any order."""
    orders = math.factorial(len(group))
    for member in set(group):
        orders //= math.factorial(group.count(member))
    return orders * math.prod(every[member].chance for member in group)


@dataclass(frozen=True)
class SampledCourt:
    """Holds the episodes of a court, their groups, and their turns with measured credit."""

    played: list[Episode]
    groups: np.ndarray
    turns: JudgedTurns

    @classmethod
    def sample(
        cls, generator: np.random.Generator, groups: int = GROUPS, samples: int = SAMPLES
    ) -> SampledCourt:
        """Plays a court's episodes, and continuations from the state of every turn."""
        played = []
        branched: list[BranchedEpisode] = []
        for group in range(groups):
            number = int(generator.choice(NUMBERS))
            every = all_episodes(number)
            chances = [episode.chance for episode in every]
            for member in generator.choice(len(every), p=chances, size=GROUP).tolist():
                episode = every[member]
                played.append(episode)
                # A continuation pays 1 or 0.
                returns = [
                    (generator.random(samples) < value(state, number)).astype(float).tolist()
                    for state in episode.states
                ]
                branched.append(
                    BranchedEpisode(
                        episode_id=str(len(branched)),
                        group=str(group),
                        rewards=episode.rewards,
                        tokens=[1] * len(episode.rewards),
                        returns=returns,
                    )
                )
        return cls(played, np.repeat(np.arange(groups), GROUP), JudgedTurns.of(branched))

    @property
    def true_credit(self) -> np.ndarray:
        """Returns the exact credit of the turns: (turns,)."""
        return np.concatenate([episode.credit for episode in self.played])

    def credit(self, estimator: str) -> np.ndarray:
        """Returns what an estimator gives the turns: (turns,)."""
        return estimate(estimator, self.played, self.groups)

    def judge(self, estimator: str, seed: int) -> Agreement:
        """Judges an estimator."""
        return agreement(self.credit(estimator), self.turns, seed=seed)


def coverage(
    courts: int, seed: int = 0, names: Sequence[str] = ESTIMATORS
) -> dict[str, dict[str, float]]:
    """Samples courts; returns by estimator and statistic the share of intervals with the truth."""
    generator = np.random.default_rng(seed)
    held = {name: dict.fromkeys(EXACT, 0) for name in names}
    for number in range(courts):
        court = SampledCourt.sample(generator)
        for name in names:
            found = court.judge(name, seed=number)
            for statistic in EXACT:
                held[name][statistic] += truth(name)[statistic] in getattr(found, statistic)
    return {
        name: {statistic: count / courts for statistic, count in counts.items()}
        for name, counts in held.items()
    }


def table(shares: dict[str, dict[str, float]]) -> str:
    """Writes the truth and the coverage as a table in Markdown."""
    lines = [f"| estimator | {' | '.join(EXACT)} |", f"|{'---|' * (len(EXACT) + 1)}"]
    for name, held in shares.items():
        cells = [f"{truth(name)[each]:.3f}, {100 * held[each]:.1f} %" for each in EXACT]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 where an interval covers less than 92 or more than 98 %."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--courts", type=int, default=COURTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    shares = coverage(args.courts, args.seed)
    print(table(shares))
    outside = [
        f"{name} {statistic}"
        for name, held in shares.items()
        for statistic, share in held.items()
        if not 0.92 <= share <= 0.98
    ]
    print(f"outside 92 to 98 %: {', '.join(outside) or 'none'}")
    return int(bool(outside))


if __name__ == "__main__":
    sys.exit(main())
