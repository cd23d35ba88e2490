"""Answers what an episode's environment asks the policy while one of its calls waits.

    step ---> reply with questions ---> Questions.answer ---> Samples ---> the engine
      ^                                        |
      +------- the answers, by "answer" -------+

A run that answers them has a `QuestionRule` (features/policy_calls); in any other each question is
refused in a sentence, which its asker gets. Invariant: while questions are answered the environment
does nothing else, and each question is answered once, or the episode ends and its environment with
it.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from custom.asking import PolicyAnswer, Question
from data.loading import load_object
from training.features import folder_that_brings, named

if TYPE_CHECKING:
    from data.turn_tokens import TurnTokens
    from training.config import PPOConfig
    from workers.rollout.episode import Episode, Request, Sampler, TurnLimits


class Questions:
    """Answers the questions of one attempt of an episode; by default it refuses each."""

    def answer(
        self, questions: Sequence[Question]
    ) -> Generator[Request, Any, Sequence[PolicyAnswer]]:
        """Answers questions that were asked at once, in their order.

        Raises:
            Ended: there will be no answers; the episode ends so, and its environment is given up.
        """
        yield from ()
        error = (
            "the policy answers no questions in this run: that is done by "
            f"{folder_that_brings('questions')}"
        )
        return [PolicyAnswer(refusal="not_set_up", error=error) for _ in questions]

    def pay(self, paid: Mapping[int, float]) -> None:
        """Notes what answers have earned, by the number of the question."""

    def close(self) -> None:
        """Completes the episode's rows, once it has ended."""


class QuestionRule(Protocol):
    """Makes what answers the questions of an attempt of an episode."""

    def __call__(
        self, episode: Episode, sampler: Sampler, limits: TurnLimits, tokens: TurnTokens
    ) -> Questions: ...


def open_questions(config: PPOConfig, tokens: TurnTokens) -> QuestionRule | None:
    """Opens what answers questions in this run; None: nothing does."""
    for feature, place in named("questions"):
        rule: QuestionRule | None = load_object(place, f"feature {feature}")(config, tokens)
        return rule
    return None
