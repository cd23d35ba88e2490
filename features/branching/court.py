"""Judges estimators by the credit that continuations measured: a table, and one sentence.

Invariant: all estimators are judged on the same turns, and their order is that of their correlation
with the true credit, the best first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from features.branching.agreement import Agreement, agreement
from features.branching.credit import JudgedTurns

HEADINGS = (
    "estimator",
    "r",
    "slope",
    "mse",
    "same sign",
    "error a token",
    "error an episode",
)


@dataclass(frozen=True, kw_only=True)
class WrongTurn:
    """Holds a turn that an estimator credited most wrongly.

    Attributes:
        episode: its name. turn: its number.
        credit: what the estimator gave, in the size of the measured credit.
        measured: by all continuations.
    """

    episode: str
    turn: int
    credit: float
    measured: float


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Holds what a court says of an estimator.

    Attributes:
        estimator: its name.
        agreement: its statistics.
        credit: (turns,) what it gave each turn.
    """

    estimator: str
    agreement: Agreement
    credit: np.ndarray

    def cells(self) -> list[str]:
        """Returns the judgement's row of a table, a text below each of HEADINGS."""
        found = self.agreement
        return [
            self.estimator,
            str(found.r),
            str(found.slope),
            found.mse.with_digits(),
            str(found.sign),
            found.token.with_digits(),
            found.episode.with_digits(),
        ]

    def most_wrong(self, turns: JudgedTurns, count: int) -> list[WrongTurn]:
        """Lists the turns whose credit is farthest from the measured one, the worst first.

        Credit is divided by its slope where that is above 0, so that its size does not count.
        """
        slope = self.agreement.slope.value
        scale = slope if 0 < slope < np.inf else 1.0
        credit = self.credit / scale
        measured = turns.measured
        order = np.argsort(-np.abs(credit - measured), kind="stable")[:count]
        return [
            WrongTurn(
                episode=turns.episode_names[turns.episode[place]],
                turn=int(turns.turn[place]),
                credit=float(credit[place]),
                measured=float(measured[place]),
            )
            for place in order.tolist()
        ]


@dataclass(frozen=True, kw_only=True)
class Court:
    """Holds a court's judgements, the best estimator first, and the turns they were judged on."""

    turns: JudgedTurns
    judgements: tuple[Judgement, ...]

    @classmethod
    def of(cls, turns: JudgedTurns, credits: Mapping[str, np.ndarray], *, seed: int = 0) -> Court:
        """Judges estimators.

        Args:
            credits: by the estimator's name (turns,) what it gives each turn.
            seed: of the intervals.
        Raises:
            ValueError: there is no estimator, there are fewer than three groups, or credit is no
                array of finite numbers; the sentence names the estimator.
        """
        if not credits:
            raise ValueError("a court needs an estimator to judge: name one or more")
        judgements = []
        for name, credit in credits.items():
            try:
                found = agreement(credit, turns, seed=seed)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            judgements.append(Judgement(estimator=name, agreement=found, credit=np.asarray(credit)))
        # sorted keeps the given order where estimators are equal.
        judgements.sort(key=lambda judged: -judged.agreement.r.value)
        return cls(turns=turns, judgements=tuple(judgements))

    @property
    def can_judge(self) -> bool:
        """Returns whether the two halves agree on any credit, so that r has a denominator."""
        first, second = self.turns.first, self.turns.second
        return bool(np.mean(first * second) > first.mean() * second.mean())

    def table(self) -> str:
        """Writes the judgements as a table in Markdown, with 95 % intervals."""
        lines = [f"| {' | '.join(HEADINGS)} |", f"|{'---|' * len(HEADINGS)}"]
        lines += [f"| {' | '.join(judged.cells())} |" for judged in self.judgements]
        return "\n".join(lines)

    def sentence(self) -> str:
        """Says which estimator agrees best, how well the others do, and whether that is known."""
        if not self.can_judge:
            return (
                "The two halves of the continuations do not agree on any credit: no estimator can "
                "be judged; take more episodes, or more continuations of a turn."
            )
        best, *others = self.judgements
        told = [f"{other.estimator} at {other.agreement.r.value:.2f}" for other in others]
        first = (
            f"{best.estimator} agrees with the truth of your environment at r = {best.agreement.r}"
        )
        sentence = "; ".join([first, ", ".join(told)] if told else [first]) + "."
        if -1.0 in best.agreement.r and 1.0 in best.agreement.r:
            groups = len(self.turns.group_names)
            sentence += (
                f" But that interval holds every correlation: episodes of {groups} groups are too "
                "few to know; take more episodes, or more continuations of a turn."
            )
        return sentence
