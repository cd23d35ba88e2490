"""An episode as a coroutine, answered by hand: what it asks for in which order, and what becomes
of the answers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from custom.agent import AgentSpec
from custom.env import BaseEnvironment, Message
from data.turn_tokens import TurnTokens
from workers.environments.reply import StepReply
from workers.environments.server import EnvServer
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import (
    Ask,
    Ended,
    Episode,
    Play,
    Row,
    Sample,
    TurnLimits,
    anchor_of,
)
from workers.rollout.episode_play import play_episode

LIMITS = TurnLimits(
    prompt_length=16, response_length=40, max_model_len=56, max_turn=3, max_turn_tokens=4
)


def tokens_of(row: Row) -> dict[str, list[Any]]:
    """Lists what a row holds of each token of its response: its turn, its mask and its reward."""
    turn_ids = [-1] * len(row.ids)
    for span in row.spans:
        turn_ids[span.start : span.end] = [span.turn] * (span.end - span.start)
    return {
        "turn_ids": turn_ids,
        "response_mask": [int(turn >= 0) for turn in turn_ids],
        "rewards": [row.reward_at.get(place, 0.0) for place in range(len(row.ids))],
    }


def sampler(episode: Episode) -> Sampling:
    return Sampling(max_tokens=40)


@pytest.fixture(scope="module")
def tokens(tiny_task: Path) -> TurnTokens:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    return TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def start(tokens: TurnTokens) -> Callable[..., tuple[Episode, Play]]:
    def make(limits: TurnLimits = LIMITS) -> tuple[Episode, Play]:
        episode = Episode(group=0, sample=0, spec=0, seed=7)
        return episode, play_episode(episode, sampler, limits, tokens, [None])

    return make


def said(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def completion(tokens: TurnTokens, text: str, finish_reason: Any = "stop") -> Completion:
    ids = tokens.tokenizer.encode(text, add_special_tokens=False)
    ids += [tokens.tokenizer.eos_token_id] if finish_reason == "stop" else []
    return Completion(
        request_id="0", token_ids=ids, log_probs=[-0.5] * len(ids), finish_reason=finish_reason
    )


def end(play: Play, answer: Any) -> None:
    with pytest.raises(StopIteration):
        play.send(answer)


def test_it_samples_and_steps_until_the_environment_is_done(start, tokens) -> None:
    episode, play = start()
    assert play.send(None) == Ask("reset", (0, 7, {}))
    request = play.send(StepReply(messages=said("guess the number")))
    assert isinstance(request, Sample)
    assert (
        request.token_ids == episode.rows[0].prompt_ids == tokens.prompt(said("guess the number"))
    )
    assert request.sampling.max_tokens == 4, "of the turn"
    assert play.send(completion(tokens, "guess 5")) == Ask("step", ("guess 5",))
    request = play.send(StepReply(messages=said("higher"), reward=0.25, seconds=2.0))
    assert isinstance(request, Sample) and request.token_ids == episode.row.token_ids
    assert play.send(completion(tokens, "guess 7")) == Ask("step", ("guess 7",))
    assert play.send(
        StepReply(messages=said("correct"), reward=1.0, done=True, seconds=1.0)
    ) == Ask("finish", ("done",))
    end(play, StepReply(done=True))
    assert (episode.ending, episode.error, episode.env_seconds) == ("done", "", 3.0)
    assert [turn.text for turn in episode.turns] == ["guess 5", "guess 7"]
    row = tokens_of(episode.row)
    first, rewards = row["turn_ids"].count(0), row["rewards"]
    assert rewards[first - 1] == 0.25 and rewards[-1] == 1.0 and sum(rewards) == 1.25
    assert row["turn_ids"][first] == -1 and row["response_mask"][first] == 0, (
        "what the environment said is not sampled"
    )


def test_a_turn_counts_the_engines_seconds_and_keeps_the_name_of_its_task(
    start, tokens, monkeypatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("workers.rollout.episode_play.time.perf_counter", lambda: now[0])
    episode, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    for seconds, name in ((2.5, "low numbers"), (0.5, "high numbers"), (0.25, "")):
        now[0] += seconds
        play.send(completion(tokens, "5"))
        now[0] += 10.0
        play.send(StepReply(messages=said("higher"), reward=0.0, task=name))
    assert [turn.engine_seconds for turn in episode.turns] == [2.5, 0.5, 0.25]
    assert [turn.reply.task for turn in episode.turns] == ["low numbers", "high numbers", ""]


def test_the_turn_limit_ends_it(start, tokens) -> None:
    _, play = start()
    play.send(None)
    request: Any = play.send(StepReply(messages=said("guess")))
    for _ in range(3):
        assert isinstance(request, Sample)
        assert play.send(completion(tokens, "5")) == Ask("step", ("5",))
        request = play.send(StepReply(messages=said("higher"), reward=0.0))
    assert request == Ask("finish", ("max_turns",))


def test_a_turn_that_fills_the_row_is_not_played(start, tokens) -> None:
    episode, play = start(TurnLimits(prompt_length=16, response_length=3, max_model_len=56))
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    assert play.send(completion(tokens, "5 5 5", "length")) == Ask("finish", ("overflow",))
    assert tokens_of(episode.row)["response_mask"] == [1, 1, 1]


def test_a_reply_that_leaves_no_room_is_not_joined(start, tokens) -> None:
    episode, play = start(TurnLimits(prompt_length=16, response_length=6, max_model_len=56))
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    assert play.send(StepReply(messages=said("higher higher higher"), reward=0.5)) == Ask(
        "finish", ("overflow",)
    )
    row = tokens_of(episode.row)
    assert row["response_mask"] == [1, 1] and sum(row["rewards"]) == 0.5


def test_an_environment_that_fails_is_not_finished(start, tokens) -> None:
    episode, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    end(play, StepReply(failure="env_timeout", error="too slow", seconds=9.0))
    assert (episode.ending, episode.error, episode.env_seconds) == ("env_timeout", "too slow", 9.0)
    assert episode.turns[-1].reply is None


def test_a_refused_request_ends_it_and_gives_the_environment_back(start) -> None:
    episode, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    assert play.throw(Ended("engine_error", "no such token")) == Ask("finish", ("engine_error",))
    end(play, StepReply(done=True))
    assert (episode.ending, episode.error) == ("engine_error", "no such token")


def test_what_the_engine_gave_up_is_an_engine_error(start, tokens) -> None:
    _, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    assert play.send(completion(tokens, "", "abort")) == Ask("finish", ("engine_error",))


def test_a_reward_function_replaces_the_environments_rewards(start, tokens) -> None:
    episode, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    assert play.send(StepReply(reward=3.0, done=True)) == Ask("finish", ("done",))
    end(play, StepReply(reward=0.75, done=True))
    assert tokens_of(episode.row)["rewards"] == [0.0, 0.75]


def test_an_episode_may_fail_in_its_finish(start, tokens) -> None:
    episode, play = start()
    play.send(None)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    play.send(StepReply(reward=3.0, done=True))
    end(play, StepReply(failure="env_crash", error="in reward_fn"))
    assert (episode.ending, episode.error) == ("env_crash", "in reward_fn")


def test_a_prompt_alone_is_answered_once() -> None:
    episode = Episode(group=0, sample=0, rows=[Row(prompt_ids=[1, 2])])
    alone = TurnLimits(prompt_length=4, response_length=8, max_model_len=6)
    play = play_episode(episode, sampler, alone, None, [])
    assert play.send(None) == Sample([1, 2], Sampling(max_tokens=4))
    end(play, Completion(request_id="0", token_ids=[3], log_probs=[-1.0], finish_reason="stop"))
    assert episode.ending == "stop" and episode.row.ids.tolist() == [3]
    full = Episode(group=0, sample=0, rows=[Row(prompt_ids=[1] * 6)])
    end(play_episode(full, sampler, replace(alone, prompt_length=6), None, []), None)
    assert full.ending == "overflow"


def test_a_row_holds_few_bytes_a_token() -> None:
    row = Row(prompt_ids=[1, 2])
    episode = Episode(group=0, sample=0, rows=[row, Row(prompt_ids=[3])])
    row.append_sampled(
        Completion(request_id="0", token_ids=[5, 6], log_probs=[-0.5, -0.1], finish_reason="stop"),
        0,
    )
    episode.add_reward(0.25)
    row.append_tokens([7, 8])
    row.append_sampled(
        Completion(request_id="0", token_ids=[9], log_probs=[-2.0], finish_reason="stop"), 1
    )
    episode.add_reward(1.0)
    episode.add_reward(0.5)
    told = tokens_of(row)
    assert told["turn_ids"] == [0, 0, -1, -1, 1]
    assert told["response_mask"] == [1, 1, 0, 0, 1]
    assert told["rewards"] == [0.0, 0.25, 0.0, 0.0, 1.5]
    assert row.log_probs.tolist() == pytest.approx([-0.5, -0.1, 0.0, 0.0, -2.0])
    assert row.token_ids == [1, 2, 5, 6, 7, 8, 9]
    assert row.sampled_in(1) == [9]
    long = Row(prompt_ids=[1])
    ids = list(range(1000, 21_000))
    long.append_sampled(
        Completion(request_id="0", token_ids=ids, log_probs=[-0.5] * 20_000, finish_reason="stop"),
        0,
    )
    assert len(pickle.dumps(long)) < 9 * 20_000


class Named(BaseEnvironment):
    """Says the same in every room, and has a name for each."""

    def reset(self, seed: int | None = None) -> str:
        self.room = 0
        return "a room"

    def step(self, action: str) -> tuple[str, float, bool, dict[str, object]]:
        self.room += 1
        return "a room", 0.0, self.room == 2, {}

    def anchor(self) -> str:
        return f"room {self.room}"


def test_a_turn_begins_in_the_environments_name_for_its_state_or_in_what_was_said() -> None:
    server = EnvServer()
    server.build(AgentSpec(environment=Named))
    replies = [server.reset(0), server.step("go"), server.step("go")]
    assert [reply.anchor for reply in replies] == ["room 0", "room 1", None]
    assert [anchor_of(reply) for reply in replies[:2]] == ["room 0", "room 1"]
    said = [StepReply(messages=[{"role": "user", "content": text}]) for text in ("a", "b", "a")]
    one, other, again = (anchor_of(reply) for reply in said)
    assert one == again != other
