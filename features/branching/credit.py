"""Measures the credit of turns by continuations: two independent halves, from which a court judges.

    states      s0     s1     s2   end       k continuations from each state, half of them each
    V           V0     V1     V2   0         the mean return of a half's
    credit      r0+V1-V0  r1+V2-V1  r2-V2

Invariant: the episode's own return is no part of a measure: what an estimator made of it would be
judged by itself. Both halves use different continuations, and nothing else that is random.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

# Continuations that a state needs: one for each half.
LEAST_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class BranchedEpisode:
    """Holds an episode of which every turn's state was continued from.

    Attributes:
        episode_id, group: its name, and that of its task (uid).
        rewards: of each turn.
        tokens: of each turn, how many were sampled.
        returns: of each turn, the returns of the continuations from the state it began in, of that
            turn on, in the order in which they were asked for: an even number, 2 or more.
    """

    episode_id: str
    group: str
    rewards: Sequence[float]
    tokens: Sequence[int]
    returns: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        """Requires a number of each kind for every turn.

        Raises:
            ValueError: the lengths differ, a state has an odd number of continuations or none, or a
                number is not finite.
        """
        lengths = {
            "rewards": len(self.rewards),
            "tokens": len(self.tokens),
            "returns": len(self.returns),
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"episode {self.episode_id} has {lengths}: give one of each for every turn"
            )
        for turn, returns in enumerate(self.returns):
            if len(returns) < LEAST_SAMPLES or len(returns) % 2:
                raise ValueError(
                    f"turn {turn} of episode {self.episode_id} has {len(returns)} continuations; "
                    "allowed: an even number, 2 or more: leave the episode out, and count it"
                )
        numbers = [*self.rewards, *(each for returns in self.returns for each in returns)]
        if not all(isinstance(each, Real) and math.isfinite(each) for each in numbers):
            raise ValueError(
                f"episode {self.episode_id} has rewards or returns that are not finite: leave it "
                "out, and count it"
            )

    def credit(self, half: int, turn_gamma: float = 1.0) -> np.ndarray:
        """Measures the turns' credit by every other continuation: (turns,) float64.

        Args:
            half: 0 or 1.
            turn_gamma: discount of a turn, by which the returns were discounted too.
        """
        values = np.array([np.mean(returns[half::2]) for returns in self.returns])
        following = np.append(values[1:], 0.0)
        return np.asarray(self.rewards, dtype=np.float64) + turn_gamma * following - values


@dataclass(frozen=True, kw_only=True)
class JudgedTurns:
    """Holds the turns of a court, each with its credit measured twice; all (turns,).

    Attributes:
        group: int64, from 0 on: the task, which the intervals draw whole.
        episode: int64, from 0 on.
        turn: int64, its number in the episode.
        tokens: int64, how many were sampled.
        first, second: float64, its credit by one half of the continuations, and by the other.
        group_names, episode_names: by the numbers above.
    """

    group: np.ndarray
    episode: np.ndarray
    turn: np.ndarray
    tokens: np.ndarray
    first: np.ndarray
    second: np.ndarray
    group_names: tuple[str, ...]
    episode_names: tuple[str, ...]

    @classmethod
    def of(cls, episodes: Iterable[BranchedEpisode], turn_gamma: float = 1.0) -> JudgedTurns:
        """Measures the credit of the episodes' turns.

        Raises:
            ValueError: there is no turn, or an episode comes twice.
        """
        numbers_of_groups: dict[str, int] = {}
        names: list[str] = []
        columns: dict[str, list[Any]] = {
            "group": [],
            "episode": [],
            "turn": [],
            "tokens": [],
            "first": [],
            "second": [],
        }
        for number, episode in enumerate(episodes):
            turns = len(episode.rewards)
            group = numbers_of_groups.setdefault(episode.group, len(numbers_of_groups))
            names.append(episode.episode_id)
            columns["group"] += [group] * turns
            columns["episode"] += [number] * turns
            columns["turn"] += range(turns)
            columns["tokens"] += episode.tokens
            columns["first"] += episode.credit(0, turn_gamma).tolist()
            columns["second"] += episode.credit(1, turn_gamma).tolist()
        if not columns["turn"]:
            raise ValueError("no turn has a measured credit: give episodes with continuations")
        if len(set(names)) < len(names):
            raise ValueError("an episode comes twice: its turns would be judged twice")
        halves = {name: np.array(columns.pop(name), np.float64) for name in ("first", "second")}
        return cls(
            **{name: np.array(values, np.int64) for name, values in columns.items()},
            **halves,
            group_names=tuple(numbers_of_groups),
            episode_names=tuple(names),
        )

    def credit_of(
        self, advantages: np.ndarray, turn_ids: np.ndarray, episode_ids: Sequence[str]
    ) -> np.ndarray:
        """Averages an estimator's advantages over each turn's sampled tokens: (turns,) float64.

        Args:
            advantages: (rows, response_len) of a batch's rows.
            turn_ids: (rows, response_len), the turn of each sampled token, -1 elsewhere.
            episode_ids: (rows,) the episode of each row; an episode may have several.
        Raises:
            ValueError: a turn of the court has no token in the batch.
        """
        numbers = {name: number for number, name in enumerate(self.episode_names)}
        episode_of_row = np.array([numbers.get(name, -1) for name in episode_ids])
        rows, columns = np.nonzero((turn_ids >= 0) & (episode_of_row >= 0)[:, None])
        width = int(self.turn.max()) + 1
        turns_of_tokens = turn_ids[rows, columns].astype(np.int64)
        judged = turns_of_tokens < width
        rows, columns = rows[judged], columns[judged]
        places = episode_of_row[rows] * width + turns_of_tokens[judged]
        size = len(numbers) * width
        sums = np.bincount(places, advantages[rows, columns].astype(np.float64), size)
        counts = np.bincount(places, minlength=size)
        wanted = self.episode * width + self.turn
        missing = np.nonzero(counts[wanted] == 0)[0]
        if len(missing):
            first = missing[0]
            raise ValueError(
                f"turn {self.turn[first]} of episode {self.episode_names[self.episode[first]]} has "
                "no sampled token in the batch: judge what the batch has"
            )
        return sums[wanted] / counts[wanted]

    @property
    def measured(self) -> np.ndarray:
        """Returns the credit by all continuations: (turns,) float64."""
        return (self.first + self.second) / 2

    def __len__(self) -> int:
        """Counts the turns."""
        return len(self.turn)
