"""A kind of episodes that the project knows nothing of: one answer, which a scale weighs."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from data.turn_tokens import TurnTokens
from training.config.schema.agent import EnvironmentChoice
from workers.environments.reply import StepReply
from workers.rollout.episode import Episode, Play, Player, TurnLimits, ask, begin_row, sample
from workers.rollout.kinds import EpisodeKind
from workers.rollout.mixed_pool import take_new

# Specs that were tried before a run.
TRIED: list[Any] = []


@dataclass(frozen=True)
class WordSpec:
    """Weighs an answer by its letters."""

    letter: str
    kind: ClassVar[str] = "tests.e2e.word_kind:WORD"
    source: str = "word"
    max_turn: int | None = None
    max_turn_tokens: int | None = None


class Scale:
    """A pool that answers in the thread of the turn loop; `weigh` is a call of its own."""

    def __init__(self, specs: Sequence[WordSpec], replies: Any) -> None:
        self.specs = specs
        self.replies = queue.SimpleQueue() if replies is None else replies
        self.letters: dict[int, str] = {}
        self.tool_schemas = [None] * len(specs)

    def reset(self, key: int, spec: int, seed: int, task: Any = None) -> None:
        self.letters[key] = self.specs[spec].letter
        self.replies.put((key, StepReply(messages=[{"role": "user", "content": "say a number"}])))

    def weigh(self, key: int, text: str) -> None:
        reward = 1.0 + text.count(self.letters[key])
        self.replies.put((key, StepReply(reward=reward, done=True)))

    def finish(self, key: int, ending: str) -> None:
        self.replies.put((key, StepReply()))

    def poll(self, timeout: float) -> list[tuple[Any, Any]]:
        return take_new(self.replies, timeout)

    def shutdown(self) -> None:
        pass


def open_scale(config: Any, specs: Sequence[WordSpec], max_tokens: int, replies: Any) -> Scale:
    return Scale(specs, replies)


def player_of(spec: WordSpec) -> Player:
    def play(
        episode: Episode, sampler: Any, limits: TurnLimits, tokens: TurnTokens | None, tools: Any
    ) -> Play:
        assert tokens is not None
        reply = yield from ask(episode, "reset", episode.spec, episode.seed)
        begin_row(episode, reply.messages, tokens.conversation(reply.messages, None), limits)
        completion = yield from sample(episode, sampler, limits)
        weighed = yield from ask(episode, "weigh", tokens.text(completion.token_ids))  # type: ignore[arg-type]
        episode.add_reward(weighed.reward or 0.0)
        yield from ask(episode, "finish", "done")
        episode.ending = "done"

    return play


def try_words(config: Any, specs: Sequence[WordSpec], tokens: Any, task: Any) -> list[str]:
    TRIED.extend(specs)
    return [f"the letter {spec.letter!r} weighs nothing" for spec in specs if not spec.letter]


def owns(config: Any, choice: EnvironmentChoice) -> bool:
    return (choice.name or "").startswith("word:")


def spec_of(config: Any, choice: EnvironmentChoice) -> WordSpec:
    return WordSpec(str(choice.name).partition(":")[2])


def check(key: str, choice: EnvironmentChoice, config: Any, own_data: bool) -> Iterator[str]:
    if len(str(choice.name)) != len("word:x"):
        yield f"{key}.name={choice.name}: give one letter"


WORD = EpisodeKind(
    name="word",
    owns=owns,
    open_pool="tests.e2e.word_kind:open_scale",
    make_spec="tests.e2e.word_kind:spec_of",
    player="tests.e2e.word_kind:player_of",
    trial="tests.e2e.word_kind:try_words",
    check="tests.e2e.word_kind:check",
)
