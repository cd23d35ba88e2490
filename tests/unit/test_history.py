"""The hook on the history: rows that a new context begins, what the policy writes before it, and
the limits and rewards of an episode of several contexts; episodes are answered by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from custom.agent import Agent
from custom.env import BadEnvironment, BaseEnvironment, Message, NewHistory
from custom.env import StepReply as UsersReply
from custom.env_calls import check_step
from data.turn_tokens import TemplateRefusal, TurnTokens
from tests.unit.test_episode import completion, end, said, sampler, tokens_of
from training.config import AgentConfig, EnvironmentChoice, PPOConfig
from training.config.cross_checks import agents
from workers.environments.reply import StepReply, read_reply, write_reply
from workers.environments.server import EnvServer
from workers.rollout.engine import Completion
from workers.rollout.episode import Ask, Episode, Play, Sample, TurnLimits
from workers.rollout.episode_facts import episode_facts
from workers.rollout.episode_play import play_episode
from workers.rollout.history import (
    Decision,
    HistoryFault,
    HistoryRule,
    NewContext,
    Standing,
    Writing,
    Written,
    open_history,
)

LIMITS = TurnLimits(prompt_length=24, response_length=40, max_model_len=64, max_turn_tokens=4)


class Scripted(HistoryRule):
    """Answers as it is told, and keeps what it is shown."""

    def __init__(self, *decisions: Any) -> None:
        self.decisions = iter(decisions)
        self.seen: list[Standing] = []

    def next_context(self, standing: Standing) -> Any:
        self.seen.append(standing)
        decision = next(self.decisions, None)
        return decision(standing) if callable(decision) else decision


@pytest.fixture(scope="module")
def tokens(tiny_task: Path) -> TurnTokens:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    return TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])


@pytest.fixture
def start(tokens: TurnTokens) -> Callable[..., tuple[Episode, Play]]:
    def make(history: HistoryRule | None, limits: TurnLimits = LIMITS) -> tuple[Episode, Play]:
        episode = Episode(group=0, sample=0, spec=0, seed=7)
        play = play_episode(episode, sampler, limits, tokens, [None], history)
        play.send(None)
        return episode, play

    return make


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def has_summary(is_trained: bool = True) -> Callable[[Standing], Iterator[Any]]:
    def next_context(standing: Standing) -> Any:
        written: Written = yield Writing(said("guess lower"), 3, "summary", is_trained)
        summary = said(f"{written.text} {written.tokens}")
        return NewContext([*standing.task, *summary, *standing.reply], "summary")

    return next_context


def test_a_history_that_always_goes_on_changes_nothing(start, tokens) -> None:
    played = []
    for history in (None, HistoryRule()):
        episode, play = start(history)
        requests = [play.send(StepReply(messages=said("guess")))]
        for answer in ("higher", "lower", "higher higher"):
            requests.append(play.send(completion(tokens, "5")))
            requests.append(play.send(StepReply(messages=said(answer), reward=0.5)))
        play.send(completion(tokens, "7"))
        play.send(StepReply(reward=1.0, done=True))
        end(play, StepReply(done=True))
        played.append((requests, replace(episode, seconds=0.0)))
        for turn in episode.turns:
            turn.engine_seconds = 0.0
    assert played[0] == played[1]
    assert len(played[0][1].rows) == 1 and played[0][1].row.seam is None


def test_a_new_context_begins_a_row_of_the_same_episode(start, tokens) -> None:
    history = Scripted(
        None, lambda standing: NewContext([*standing.task, *standing.reply], "last_turns")
    )
    episode, play = start(history)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    play.send(StepReply(messages=said("higher"), reward=0.0))
    play.send(completion(tokens, "6"))
    request = play.send(StepReply(messages=said("lower"), reward=0.25))
    prompt = tokens.prompt([*said("guess"), *said("lower")])
    assert request.token_ids == prompt == episode.row.prompt_ids
    first, second = episode.rows
    assert tokens_of(first)["turn_ids"][-1] == 1, "nothing is joined behind the last turn"
    assert tokens_of(first)["rewards"][-1] == 0.25
    assert second.seam == ("last_turns", 3, len(first.token_ids), "")
    # What each prompt was rendered from.
    for row in (first, second):
        assert row.source is not None and tokens.prompt(row.source.messages) == row.prompt_ids
    play.send(completion(tokens, "7"))
    play.send(StepReply(reward=1.0, done=True))
    end(play, StepReply(done=True))
    assert tokens_of(second) == {
        "turn_ids": [2, 2],
        "response_mask": [1, 1],
        "rewards": [0.0, 1.0],
    }


def test_a_history_is_shown_where_the_episode_stands(start, tokens) -> None:
    history = Scripted(None, lambda standing: NewContext(standing.reply, "own"), None)
    episode, play = start(history)
    play.send(StepReply(messages=said("guess")))
    for answer in ("higher", "lower", "higher lower"):
        play.send(completion(tokens, "5"))
        play.send(StepReply(messages=said(answer), reward=0.0))
    first, second, third = history.seen
    assert first.task == second.task == third.task == said("guess")
    assert first.messages == [*said("guess"), assistant("5")] and first.reply == said("higher")
    assert second.messages == [*first.messages, *said("higher"), assistant("5")]
    assert third.messages == [*said("lower"), assistant("5")], "the second context's"
    assert third.reply == said("higher lower")
    assert [each.turns for each in history.seen] == [1, 2, 1]
    whole = [*second.messages, *second.reply]
    assert second.tokens == len(tokens.prompt(whole)) == second.count(whole)
    first_prompt = len(episode.rows[0].prompt_ids)
    assert second.room == 40 - (second.tokens - first_prompt)
    assert first.seed == second.seed != third.seed, "a context's own"
    assert not second.is_full
    assert (second.turn_tokens, second.max_prompt) == (4, 24)


def test_what_the_policy_writes_is_a_turn_behind_its_last_one(start, tokens) -> None:
    history = Scripted(has_summary())
    episode, play = start(history)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    request = play.send(StepReply(messages=said("higher"), reward=0.25, anchor="room"))
    asked = [*said("guess"), assistant("5"), *said("guess lower")]
    assert request.token_ids == tokens.prompt(asked), "in place of the reply"
    assert request.sampling.max_tokens == 3
    request = play.send(completion(tokens, "6"))
    assert request.token_ids == tokens.prompt([*said("guess"), *said("6 2"), *said("higher")])
    play.send(completion(tokens, "7"))
    assert play.send(StepReply(reward=1.0, done=True)) == Ask("finish", ("done",))
    end(play, StepReply(done=True))
    written = episode.turns[1]
    assert (written.text, written.writes, written.asked) == ("6", "summary", said("guess lower"))
    assert (written.reply, written.behind, written.anchor) == (None, 0, "summary room")
    first, second = episode.rows
    assert [span.turn for row in episode.rows for span in row.spans] == [0, 1, 2]
    assert tokens_of(first)["rewards"][1] == 0.25 and sum(tokens_of(first)["rewards"]) == 0.25
    assert tokens_of(second)["rewards"] == [0.0, 1.0]
    facts = episode_facts(episode)
    assert (facts["turns"], facts["sampled_tokens"], facts["paid"]) == (2, 6, 1.25)
    assert len(episode.anchors) == 3, "one for each turn's number"


def test_a_written_turn_that_is_not_trained_on_has_mask_zero_and_bears_no_reward(
    start, tokens
) -> None:
    episode, play = start(Scripted(has_summary(is_trained=False)))
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    play.send(StepReply(messages=said("higher"), reward=0.0))
    # The new context has no room, so that the written turn is the last.
    assert play.send(completion(tokens, "6")) != Ask("finish", ("overflow",))
    play.close()
    episode.rows = episode.rows[:1]
    episode.add_reward(0.75)
    assert tokens_of(episode.row)["rewards"][1] == 0.75, "on the turn before it"
    episode.leave_untrained_out()
    assert set(tokens_of(episode.row)["turn_ids"]) == {0, -1}


def test_a_context_that_is_too_long_ends_the_episode(start, tokens) -> None:
    long = said("guess " * 30)
    episode, play = start(Scripted(NewContext(long, "own")))
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    assert play.send(StepReply(messages=said("higher"))) == Ask("finish", ("overflow",))
    assert len(episode.rows) == 1


def test_there_may_be_no_room_to_write(start, tokens) -> None:
    written: list[Written] = []

    def next_context(standing: Standing) -> Any:
        written.append((yield Writing(said("guess " * 40), 3, "summary")))
        return NewContext(standing.reply, "own", fault="there was no room")

    episode, play = start(Scripted(next_context))
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    request = play.send(StepReply(messages=said("higher")))
    assert request.token_ids == tokens.prompt(said("higher"))
    assert written == [Written("", 0)] and len(episode.turns) == 1
    assert episode.row.seam is not None and episode.row.seam.fault == "there was no room"


def test_turns_leave_room_for_what_is_reserved(start, tokens) -> None:
    limits = replace(LIMITS, response_length=6, max_turn_tokens=None, reserved=4)
    _, play = start(None, limits)
    request = play.send(StepReply(messages=said("guess")))
    assert request.sampling.max_tokens == 2
    assert play.send(completion(tokens, "5 5", "length")) == Ask("finish", ("overflow",))


def test_a_turn_that_the_context_cuts_is_taken_anew_in_the_next(start, tokens) -> None:
    def begin(standing: Standing) -> Decision:
        return NewContext([*standing.task, *standing.reply], "own")

    history = Scripted(None, begin)
    limits = replace(LIMITS, response_length=12, max_turn_tokens=None)
    episode, play = start(history, limits)
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    request = play.send(StepReply(messages=said("higher"), reward=0.0, anchor="room"))
    room = request.sampling.max_tokens
    request = play.send(completion(tokens, " ".join("5" * room), "length"))
    assert request.token_ids == tokens.prompt([*said("guess"), *said("higher")])
    assert history.seen[1].messages == [*said("guess"), assistant("5")]
    assert history.seen[1].is_full and history.seen[1].turns == 1
    assert play.send(completion(tokens, "6")) == Ask("step", ("6",))
    assert [turn.anchor for turn in episode.turns[1:]] == ["room", "room"]
    assert episode.turns[1].reply is None


def test_the_first_turn_of_a_context_that_is_cut_ends_the_episode(start, tokens) -> None:
    history = Scripted(NewContext(said("guess"), "own"))
    limits = replace(LIMITS, response_length=3, max_turn_tokens=None)
    _, play = start(history, limits)
    play.send(StepReply(messages=said("guess")))
    assert play.send(completion(tokens, "5 5 5", "length")) == Ask("finish", ("overflow",))
    assert not history.seen


def test_an_episode_has_a_limit_of_its_own(start, tokens) -> None:
    def begin(standing: Standing) -> Decision:
        return NewContext(standing.reply, "own")

    limits = replace(LIMITS, max_episode_tokens=7)
    episode, play = start(Scripted(begin, begin, begin), limits)
    request = play.send(StepReply(messages=said("guess")))
    room = []
    for _ in range(3):
        room.append(request.sampling.max_tokens)
        play.send(completion(tokens, "5 6"))
        request = play.send(StepReply(messages=said("higher"), reward=0.0))
    assert room == [4, 4, 1], "7 tokens in all: 3, 3 and the last one"
    assert episode.tokens == 9, "the engine of this test gives more than it was asked for"
    assert request == Ask("finish", ("overflow",))


def test_a_turn_that_the_episodes_limit_cuts_ends_it(start, tokens) -> None:
    history = Scripted(None, NewContext(said("guess"), "own"))
    _, play = start(history, replace(LIMITS, max_episode_tokens=12, max_turn_tokens=None))
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    request = play.send(StepReply(messages=said("higher"), reward=0.0))
    sampled: Completion = completion(tokens, " ".join("5" * request.sampling.max_tokens), "length")
    assert play.send(sampled) == Ask("finish", ("overflow",))
    assert len(history.seen) == 1


class Cellar(BaseEnvironment):
    """Replaces the conversation by one that says where the player is."""

    def reset(self, seed: int | None = None) -> str:
        return "guess"

    def step(self, action: str) -> Any:
        if action == "end":
            return UsersReply(observation="higher", reward=1.0, done=True)
        return UsersReply(messages=[*said("guess"), assistant(action), *said("lower")], reward=0.5)


def test_an_environment_replaces_the_history(start, tokens) -> None:
    server = EnvServer()
    server.agent = Agent(Cellar())
    episode, play = start(None)
    play.send(server.call("reset", (7,)))
    play.send(completion(tokens, "5"))
    reply = server.call("step", ("5",))
    assert reply.replaces_history and reply.reward == 0.5
    assert read_reply(write_reply(reply, "step")) == reply, "and from another process"
    request = play.send(reply)
    assert request.token_ids == tokens.prompt([*said("guess"), assistant("5"), *said("lower")])
    assert episode.row.seam is not None and episode.row.seam.reason == "environment"
    assert episode.row.seam.dropped == 0
    play.send(completion(tokens, "end"))
    reply = server.call("step", ("end",))
    assert not reply.replaces_history
    assert play.send(reply) == Ask("finish", ("done",))


def test_a_history_that_an_environment_gives_is_checked() -> None:
    result = check_step(UsersReply(messages=said("x" * 30)), "Cellar.step", max_chars=30)
    assert isinstance(result.observation, NewHistory)
    assert result.observation == said("x" * 30) and result.reward == 0.0
    many = [*said("x" * 30), *said("y" * 30)]
    assert check_step(UsersReply(messages=many), "Cellar.step", max_chars=30).observation == many
    with pytest.raises(BadEnvironment, match=r"Cellar.step returned StepReply\(messages=\[\]\)"):
        check_step(UsersReply(messages=[]), "Cellar.step")
    with pytest.raises(BadEnvironment, match=r"Cellar\.step returned the observation"):
        check_step(UsersReply(messages=[{"role": "king"}]), "Cellar.step")  # type: ignore[list-item, dict-item]


def test_a_sample_that_the_engine_gives_up_while_it_writes_ends_the_episode(start, tokens) -> None:
    _, play = start(Scripted(has_summary()))
    play.send(StepReply(messages=said("guess")))
    play.send(completion(tokens, "5"))
    assert isinstance(play.send(StepReply(messages=said("higher"))), Sample)
    assert play.send(completion(tokens, "", "abort")) == Ask("finish", ("engine_error",))


def test_contexts_that_no_feature_decides_are_refused_with_its_folder(no_features: Path) -> None:
    environment = EnvironmentChoice(name="custom.envs.guess_number:GuessNumber")
    config = PPOConfig(agent=AgentConfig(context="summarise", environment=environment))
    refusal = (
        "agent.context=summarise is decided by features/context, which is not here: put the "
        "folder back, or set agent.context=keep"
    )
    assert refusal in list(agents.problems(config))
    with pytest.raises(HistoryFault, match=r"features/context, which is not here"):
        open_history(config, None)  # type: ignore[arg-type]


def test_a_template_that_refuses_what_a_history_counts_or_says_ends_the_episode(
    start, tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(messages: list[Message], tools: Any = None) -> Any:
        raise TemplateRefusal("roles take turns")

    def counting(standing: Standing) -> Any:
        return NewContext(standing.reply, str(standing.count(standing.reply)))

    said_at_once = NewContext(said("guess"), "own")
    for decision, words in ((counting, "a new context"), (said_at_once, "the new context (own)")):
        episode, play = start(Scripted(decision))
        play.send(StepReply(messages=said("guess")))
        play.send(completion(tokens, "5"))
        with monkeypatch.context() as patch:
            patch.setattr(tokens, "history", refuse)
            assert play.send(StepReply(messages=said("higher"))) == Ask("finish", ("env_crash",))
        end(play, StepReply(done=True))
        assert episode.error == f"{words} is refused: roles take turns"
