"""Answers the questions of an episode's environment: beside the engine, in rows of the episode.

    question ---> a place in a row ---> Sample ---> Completion ---> a turn, and the answer

A conversation that goes on from an earlier answer grows that answer's row (features/shared/
conversations.py), so that what was sampled is read as the ids that it is. Questions that are asked
at once are numbered, seeded and given to the engine by their content, so that the order in which
they happen to come decides nothing. Invariant: the rows of answers stand among the episode's,
`aside`, and count for it; a conversation that was paid a reward of its own is an episode of its own
to estimators, and nothing of the episode's reward lies there.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from custom.asking import PolicyAnswer, Question, Refusal
from data.turn_tokens import TemplateRefusal, TurnTokens
from features.policy_calls.settings import PolicyCallsSettings
from features.shared.conversations import Conversations, RowPlace, is_among
from training.config import PPOConfig
from workers.environments.reply import StepReply
from workers.rollout.engine import Completion
from workers.rollout.episode import (
    Ended,
    Episode,
    PromptSource,
    Request,
    Row,
    Sample,
    Sampler,
    Samples,
    Several,
    Turn,
    TurnLimits,
)
from workers.rollout.questions import QuestionRule, Questions
from workers.rollout.speaker import Speaker

# Numbers of turns from here on stand for what is asked, and not for how many turns there were.
FIRST_OF_CONTENTS = 2_000_000_000


def open_questions(config: PPOConfig, tokens: TurnTokens) -> QuestionRule | None:
    """Opens what answers questions; None where the config turns it off."""
    settings = config.section(PolicyCallsSettings)
    if not settings.enable:
        return None

    def answer_episode(
        episode: Episode, sampler: Sampler, limits: TurnLimits, tokens: TurnTokens
    ) -> Questions:
        return PolicyCalls(settings, episode, sampler, limits, tokens)

    return answer_episode


@dataclass(eq=False)
class Launched:
    """Holds a question whose answer is being sampled.

    Attributes:
        place: in a row.
        turn: the answer's, in the episode.
        number: of the question, in the episode.
        order: among those that were asked with it.
    """

    question: Question
    place: RowPlace
    turn: int
    number: int
    order: int


@dataclass(eq=False)
class PolicyCalls(Questions):
    """Answers the questions of one attempt of an episode.

    Attributes:
        turn_of: the turn of each question that was answered, by its number.
        paid: what answers have earned by themselves, by turn.
        sampled: tokens of all answers.
        refused: questions without an answer.
        contents: how often the same ids were to be continued.
        names: who was asked in each turn.
    """

    settings: PolicyCallsSettings
    episode: Episode
    sampler: Sampler
    limits: TurnLimits
    tokens: TurnTokens
    turn_of: list[int] = field(default_factory=list, init=False)
    paid: dict[int, float] = field(default_factory=dict, init=False)
    sampled: int = field(default=0, init=False)
    refused: int = field(default=0, init=False)
    contents: Counter[int] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        # Nothing is reserved in these rows: no history writes in them.
        limits = replace(self.limits, reserved=0)
        self.conversations = Conversations(self.tokens, limits, self.episode.rows)

    def answer(
        self, questions: Sequence[Question]
    ) -> Generator[Request, Any, Sequence[PolicyAnswer]]:
        """Answers questions that were asked at once, in their order.

        Raises:
            Ended: the engine failed, or the environment goes on asking what is refused.
        """
        answers: dict[int, PolicyAnswer] = {}
        launched: dict[int, Launched] = {}
        samples: list[Sample] = []
        # Tokens that those before it in the bundle may take.
        promised = 0
        for order in sorted(range(len(questions)), key=lambda order: content(questions[order])):
            found = self._launch(questions[order], order, promised)
            if isinstance(found, PolicyAnswer):
                answers[order] = found
                continue
            entry, sample = found
            launched[sample.number] = entry
            samples.append(sample)
            promised += sample.sampling.max_tokens
        self._end_who_asks_for_ever()
        if samples:
            for entry, answer in (yield from self._sampled(launched, samples)):
                answers[entry.order] = answer
        return [answers[order] for order in range(len(questions))]

    # Questions

    def _launch(
        self, question: Question, order: int, promised: int
    ) -> PolicyAnswer | tuple[Launched, Sample]:
        """Finds a place for a question, or refuses it.

        Args:
            promised: tokens that are not sampled yet, and may be.
        """
        settings = self.settings
        left = settings.max_episode_tokens - self.sampled - promised
        if len(self.turn_of) >= settings.max_calls:
            return self._refuse(
                "limit",
                f"the episode has had its {settings.max_calls} answers (policy_calls.max_calls)",
            )
        if question.depth > settings.max_depth:
            return self._refuse(
                "limit",
                f"a question of depth {question.depth} is deeper than "
                f"{settings.max_depth} (policy_calls.max_depth)",
            )
        if left <= 0:
            return self._refuse(
                "limit",
                f"the episode's answers have had their {settings.max_episode_tokens} tokens "
                "(policy_calls.max_episode_tokens)",
            )
        left = min(left, self.limits.left(self.episode) - promised)
        if left <= 0:
            return self._refuse(
                "limit",
                f"the episode has had its {self.limits.max_episode_tokens} tokens "
                "(agent.max_episode_tokens)",
            )
        try:
            place = self.conversations.place(question.messages, None)
        except TemplateRefusal as error:
            return self._refuse("template", f"the chat template refuses the messages: {error}")
        if place is None:
            return self._refuse("context_length", self._too_long(question))
        return self._enter(question, place, order, left)

    def _too_long(self, question: Question) -> str:
        """Says that messages have no room."""
        size = len(self.tokens.prompt(question.messages))
        return (
            f"the messages have {size} tokens: a conversation may begin with "
            f"{self.limits.prompt_length} (data.max_prompt_length), and all behind that may have "
            f"{self.limits.response_length} (data.max_response_length)"
        )

    def _refuse(self, refusal: Refusal, error: str) -> PolicyAnswer:
        self.refused += 1
        return PolicyAnswer(refusal=refusal, error=error)

    def _end_who_asks_for_ever(self) -> None:
        """Ends the episode of an environment that does not take a refusal. Raises Ended."""
        if self.refused > self.settings.max_refused:
            # As an endless loop would be ended, which a policy may have brought about.
            raise Ended(
                "env_timeout",
                f"the environment asked the policy {self.refused} times more than it may "
                "(policy_calls.max_refused)",
            )

    def _enter(
        self, question: Question, place: RowPlace, order: int, left: int
    ) -> tuple[Launched, Sample]:
        """Makes a question a turn of the episode, to be sampled with at most so many tokens."""
        episode = self.episode
        place.row.aside = True
        seed_turn = self._seed_turn([*place.row.token_ids, *place.given])
        row = self.conversations.enter(place)
        if place.kind == "begins":
            row.source = PromptSource(question.messages)
        turn = Turn(
            text="",
            finish_reason="",
            anchor=f"{question.name} {content(question)[:16]}",
            asked=question.messages,
            behind=None if place.behind is None else place.behind.turn,
            writes=question.name,
            aside=True,
            is_trained=question.trained,
        )
        episode.turns.append(turn)
        number = len(self.turn_of)
        self.turn_of.append(len(episode.turns) - 1)
        sampling = self.sampler(episode, seed_turn)
        room = self.conversations.limits.room(row)
        bounds = (self.settings.max_tokens, question.max_tokens)
        most = min([left, room, sampling.max_tokens, *(bound for bound in bounds if bound)])
        entry = Launched(question, place, len(episode.turns) - 1, number, order)
        # 0 is the number of the episode's own turns.
        sample = Sample(row.token_ids, replace(sampling, max_tokens=most), number + 1)
        return entry, sample

    def _seed_turn(self, ids: Sequence[int]) -> int:
        """Returns the number of the turn that seeds an answer: of what is to be continued."""
        digest = int.from_bytes(hashlib.blake2b(array("q", ids).tobytes(), digest_size=4).digest())
        self.contents[digest] += 1
        return FIRST_OF_CONTENTS + digest + self.contents[digest]

    # Answers

    def _sampled(
        self, launched: Mapping[int, Launched], samples: Sequence[Sample]
    ) -> Generator[Request, Any, list[tuple[Launched, PolicyAnswer]]]:
        """Has the engine sample, and adds what it sampled to the rows. Raises Ended."""
        begun = time.perf_counter()
        try:
            completion: Completion = yield Samples(samples)
        except Ended:
            for entry in launched.values():
                self._drop(entry)
            raise
        answered: list[tuple[Launched, PolicyAnswer]] = []
        aborted = 0
        while True:
            entry = launched[int(completion.request_id.rpartition(".")[2])]
            if completion.finish_reason == "abort":
                aborted += 1
                self._drop(entry)
            else:
                seconds = time.perf_counter() - begun
                answered.append((entry, self._take(entry, completion, seconds)))
            if len(answered) + aborted == len(launched):
                break
            completion = yield Several()
        if aborted:
            raise Ended("engine_error", "the engine aborted an answer to the environment")
        return answered

    def _drop(self, entry: Launched) -> None:
        """Gives up a place in which nothing was sampled."""
        self.conversations.drop(entry.place)
        self.episode.turns[entry.turn].finish_reason = "abort"

    def _take(self, entry: Launched, completion: Completion, seconds: float) -> PolicyAnswer:
        """Adds an answer to its row and its turn."""
        entry.place.row.append_sampled(completion, entry.turn)
        self.conversations.leave(entry.place, entry.turn, list(completion.token_ids))
        turn = self.episode.turns[entry.turn]
        turn.text = self.tokens.text(completion.token_ids)
        turn.finish_reason = completion.finish_reason
        turn.tokens = len(completion.token_ids)
        turn.engine_seconds = seconds
        self.sampled += turn.tokens
        return PolicyAnswer(
            number=entry.number,
            text=turn.text,
            finish_reason=turn.finish_reason,
            tokens=turn.tokens,
        )

    # Rewards

    def pay(self, paid: Mapping[int, float]) -> None:
        """Notes what answers have earned by themselves; an unknown number is passed over."""
        for number, reward in paid.items():
            if 0 <= number < len(self.turn_of):
                turn = self.turn_of[number]
                if self.episode.turns[turn].is_trained:
                    self.paid[turn] = reward

    def close(self) -> None:
        """Makes each row that was paid a conversation of its own, and counts."""
        rows = [row for row in self.episode.rows if row.aside]
        own = [row for row in rows if any(span.turn in self.paid for span in row.spans)]
        self._move_rewards(own)
        for row in own:
            first = row.spans[0].turn
            row.speaker = Speaker(self.episode.turns[first].writes, str(first))
            row.reward_at = self._rewards_of(row)
        for turn, reward in self.paid.items():
            self.episode.turns[turn].reply = StepReply(reward=reward)
        self.episode.asked = {
            "answers": float(sum(turn.aside and turn.tokens > 0 for turn in self.episode.turns)),
            "refused": float(self.refused),
            "tokens": float(self.sampled),
            "paid": float(len(self.paid)),
        }

    def _rewards_of(self, row: Row) -> dict[int, float]:
        """Returns what a row's answers have earned by themselves, each on its last token."""
        last_of_turn = {span.turn: span.end - 1 for span in row.spans}
        return {last: self.paid[turn] for turn, last in last_of_turn.items() if turn in self.paid}

    def _move_rewards(self, own: Sequence[Row]) -> None:
        """Moves the episode's rewards from these rows to the last token before, else behind."""
        others = []
        for row in self.episode.rows:
            if is_among(row, own):
                continue
            for span in row.spans:
                if not self.episode.is_left_out(span):
                    others.append((span.turn, row, span.end - 1))
        others.sort(key=lambda entry: (entry[0], entry[2]))
        for row in own:
            for place, reward in row.reward_at.items():
                turn = next(span.turn for span in row.spans if span.start <= place < span.end)
                before = [entry for entry in others if entry[0] < turn]
                if not others:
                    continue
                _, target, last = before[-1] if before else others[0]
                target.reward_at[last] = target.reward_at.get(last, 0.0) + reward


def content(question: Question) -> str:
    """Returns 32 characters that stand for a question, by which those of a bundle are ordered."""
    asked: list[Any] = [
        question.messages,
        question.name,
        question.trained,
        question.max_tokens,
        question.depth,
    ]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).hexdigest()
