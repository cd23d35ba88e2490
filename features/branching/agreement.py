"""Says how far an estimator's credit is from what continuations measured: statistics of a court.

A1 and A2 are a turn's credit by two independent halves of its continuations, Ā their mean, Â what
the estimator gives. Their noise is independent, so that products of the two halves have none on
average; what divides by the variance of Ā would be biased by its noise.

    mse      mean((Â - A1)(Â - A2))                   squared distance to the true credit
    r        cov(Â, Ā) / sqrt(var(Â) cov(A1, A2))     correlation with the true credit
    slope    cov(Â, Ā) / cov(A1, A2)                  1: credit has the true size
    sign     share of turns in which Â and Ā have one sign, a half where either is 0
    token    mean of Â - Ā over sampled tokens        0: what a token-mean is shifted by
    episode  mean over episodes of their turns' sum of Â - Ā

mse, r and slope are those of the true credit, however few continuations there are; `sign` compares
with Ā, whose noise moves it towards a half. Invariant: all follow from sums over groups. `r` may be
above 1; without a denominator above 0 it is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from features.branching.credit import JudgedTurns
from features.branching.intervals import Interval, intervals

# A variance below this part of the mean square is none.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Agreement:
    """Holds the statistics of one estimator, each with its 95 % interval."""

    mse: Interval
    r: Interval
    slope: Interval
    sign: Interval
    token: Interval
    episode: Interval


@dataclass(frozen=True)
class Sums:
    """Names the columns of sums over turns, (...,) float64 each.

    Attributes:
        turns, tokens, episodes: how many there are.
        credit, first, second: of Â, A1, A2, less the mean over all turns of Â, or of Ā.
        squares, with_measured, halves: of Â², Â Ā, A1 A2, all less the same.
        distance: of (Â - A1)(Â - A2).
        agreeing: of 1, a half or 0 where Â and Ā have one sign, none, or two.
        token_error: of (Â - Ā) times the turn's tokens.
        error: of Â - Ā.
    """

    turns: np.ndarray
    tokens: np.ndarray
    episodes: np.ndarray
    credit: np.ndarray
    first: np.ndarray
    second: np.ndarray
    squares: np.ndarray
    with_measured: np.ndarray
    halves: np.ndarray
    distance: np.ndarray
    agreeing: np.ndarray
    token_error: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, columns: np.ndarray) -> Sums:
        """Names the columns of an array: (..., 13)."""
        return cls(*np.moveaxis(columns, -1, 0))


def group_sums(credit: np.ndarray, turns: JudgedTurns) -> np.ndarray:
    """Adds up the columns of `Sums` over each group's turns: (groups, 13) float64.

    Sums of one call can be added, and those of two calls cannot: what is subtracted differs.

    Args:
        credit: (turns,) what the estimator gives each turn.
    Raises:
        ValueError: it has another shape, is not finite, or too large to be squared.
    """
    if credit.shape != turns.first.shape or not np.isfinite(credit).all():
        raise ValueError(
            f"credit must be finite and of shape (turns,) = {turns.first.shape}; got "
            f"{credit.shape}, {int((~np.isfinite(credit)).sum())} of them not finite"
        )
    measured = turns.measured
    error = credit - measured
    one = np.ones(len(turns))
    # Covariances do not see a shift, and lose digits by a large one.
    moved = credit - credit.mean()
    first = turns.first - measured.mean()
    second = turns.second - measured.mean()
    # What is too large is refused below.
    with np.errstate(over="ignore", invalid="ignore"):
        per_turn = Sums(
            turns=one,
            tokens=turns.tokens * one,
            episodes=_first_of_episode(turns),
            credit=moved,
            first=first,
            second=second,
            squares=moved**2,
            with_measured=moved * (first + second) / 2,
            halves=first * second,
            distance=(credit - turns.first) * (credit - turns.second),
            agreeing=(1 + np.sign(credit) * np.sign(measured)) / 2,
            token_error=turns.tokens * error,
            error=error,
        )
    groups = len(turns.group_names)
    columns = [np.bincount(turns.group, column, groups) for column in vars(per_turn).values()]
    sums = np.stack(columns, axis=-1)
    if not np.isfinite(sums).all():
        raise ValueError(
            f"credit is up to {np.abs(credit).max():.3g}, and its squares are no numbers any more: "
            "scale it down"
        )
    return sums


def _first_of_episode(turns: JudgedTurns) -> np.ndarray:
    """Marks one turn of every episode: (turns,) 0 or 1."""
    _, places = np.unique(turns.episode, return_index=True)
    marked = np.zeros(len(turns))
    marked[places] = 1
    return marked


@dataclass(frozen=True)
class TurnMoments:
    """Holds means and covariances over turns, (...,) each.

    Attributes:
        credit, first, second, measured: means of Â, A1, A2, Ā.
        covariance: of Â and Ā. variance: of Â. halves: the covariance of A1 and A2, the variance
            of the true credit; each 0 where it is not above rounding.
    """

    credit: np.ndarray
    first: np.ndarray
    second: np.ndarray
    measured: np.ndarray
    covariance: np.ndarray
    variance: np.ndarray
    halves: np.ndarray

    @classmethod
    def of(cls, sums: Sums) -> TurnMoments:
        """Divides the sums by the number of turns."""
        count = np.maximum(sums.turns, 1)
        credit, first, second = (each / count for each in (sums.credit, sums.first, sums.second))
        measured = (first + second) / 2
        squares = sums.squares / count
        variance = squares - credit**2
        # Of equal numbers rounding leaves a little, to which nothing is in proportion.
        varies = variance > ROUNDING * squares
        return cls(
            credit=credit,
            first=first,
            second=second,
            measured=measured,
            covariance=np.where(varies, sums.with_measured / count - credit * measured, 0),
            variance=np.where(varies, variance, 0),
            halves=np.maximum(sums.halves / count - first * second, 0),
        )


class AgreementStatistics:
    """Computes mse, r, slope, sign, token and episode, in this order."""

    def values(self, totals: np.ndarray) -> np.ndarray:
        """Computes the statistics from sums: (..., 13) -> (..., 6)."""
        sums = Sums.of(totals)
        moments = TurnMoments.of(sums)
        root = np.sqrt(moments.variance * moments.halves)
        statistics = [
            sums.distance / np.maximum(sums.turns, 1),
            _ratio(moments.covariance, root),
            _ratio(moments.covariance, moments.halves),
            sums.agreeing / np.maximum(sums.turns, 1),
            sums.token_error / np.maximum(sums.tokens, 1),
            sums.error / np.maximum(sums.episodes, 1),
        ]
        return np.stack(statistics, axis=-1)

    def influences(self, totals: np.ndarray, sums: np.ndarray) -> np.ndarray:
        """Differentiates the statistics by the groups' weights: (resamples, groups, 6)."""
        total = Sums.of(totals[:, None])  # (resamples, 1)
        group = Sums.of(sums)  # (groups,)
        moments = TurnMoments.of(total)

        def of_mean(of_group: np.ndarray, of_all: np.ndarray, count: str) -> np.ndarray:
            all_counted = np.maximum(getattr(total, count), 1)
            return (of_group - of_all / all_counted * getattr(group, count)) / all_counted

        def of_product(products: np.ndarray, one: str, other: str, mean: np.ndarray) -> np.ndarray:
            """Differentiates a covariance, whose value is `mean`."""
            first, second = getattr(moments, one), getattr(moments, other)
            centred = (
                products
                - first * _sum_of(group, other)
                - second * _sum_of(group, one)
                + group.turns * first * second
            )
            return (centred - group.turns * mean) / np.maximum(total.turns, 1)

        covariance = of_product(group.with_measured, "credit", "measured", moments.covariance)
        variance = of_product(group.squares, "credit", "credit", moments.variance)
        halves = of_product(group.halves, "first", "second", moments.halves)
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = (covariance - moments.covariance / moments.halves * halves) / moments.halves
            relative = variance / moments.variance + halves / moments.halves
            root = np.sqrt(moments.variance * moments.halves)
            r = (covariance - moments.covariance * relative / 2) / root
        constant = (moments.variance == 0) & (moments.halves > 0)
        influences = [
            of_mean(group.distance, total.distance, "turns"),
            np.where(constant, 0, r),
            np.where(constant, 0, slope),
            of_mean(group.agreeing, total.agreeing, "turns"),
            of_mean(group.token_error, total.token_error, "tokens"),
            of_mean(group.error, total.error, "episodes"),
        ]
        return np.stack(influences, axis=-1)


def _sum_of(sums: Sums, name: str) -> np.ndarray:
    """Returns a column by its name, that of Ā too."""
    if name == "measured":
        return (sums.first + sums.second) / 2
    return np.asarray(getattr(sums, name))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Divides; where there is nothing to divide by, the result is infinite, or 0 of 0."""
    infinite = np.where(above == 0, 0.0, np.copysign(np.inf, above))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, infinite)


def agreement(credit: np.ndarray, turns: JudgedTurns, *, seed: int = 0) -> Agreement:
    """Compares an estimator's credit with what was measured.

    Args:
        credit: (turns,) what the estimator gives each turn.
        seed: of the intervals' resamples.
    Raises:
        ValueError: there are fewer than three groups, or the credit is no array of finite numbers.
    """
    sums = group_sums(np.asarray(credit, dtype=np.float64), turns)
    mse, r, slope, sign, token, episode = intervals(AgreementStatistics(), sums, seed=seed)
    # A share is nowhere else, however few the groups are.
    sign = Interval(sign.value, max(sign.low, 0.0), min(sign.high, 1.0))
    return Agreement(mse=mse, r=r, slope=slope, sign=sign, token=token, episode=episode)
