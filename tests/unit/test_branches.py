"""Branches: turns that are taken and not sampled, an environment that plays again or is put into a
state, seeds, limits and endings; episodes are answered by hand, and a loop plays some with theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from data.seeds import seed_for
from data.turn_tokens import TurnTokens
from tests.unit.test_episode import completion, end, said, sampler
from workers.environments.reply import StepReply
from workers.environments.server import EnvServer
from workers.rollout.base_rollout import turn_seed
from workers.rollout.begin import DIFFERS, SAME, Begin, Restore
from workers.rollout.branches import BranchRule, branch_columns, branch_of, refuse_questions
from workers.rollout.episode import Ask, Episode, Play, Sample, TurnLimits
from workers.rollout.episode_play import play_episode
from workers.rollout.questions import Questions

LIMITS = TurnLimits(prompt_length=24, response_length=40, max_model_len=64, max_turn_tokens=4)
RESET = StepReply(messages=said("guess"))
HIGHER = StepReply(messages=said("higher"), reward=0.25, done=False)
LOWER = StepReply(messages=said("lower"), reward=0.5, done=False)


@pytest.fixture(scope="module")
def tokens(tiny_task: Path) -> TurnTokens:
    tokenizer = AutoTokenizer.from_pretrained(tiny_task / "model")
    return TurnTokens(tokenizer, template_kwargs={}, eos_token_ids=[tokenizer.eos_token_id])


def make_begin(tokens: TurnTokens, *answers: str, **more: Any) -> Begin:
    """A branch behind these answers, which were answered by HIGHER, then LOWER."""
    return Begin(
        prefix=[completion(tokens, answer) for answer in answers],
        replies=[RESET, HIGHER, LOWER][: len(answers) + 1],
        word=f"{len(answers)}.0",
        **more,
    )


def start(tokens: TurnTokens, begin: Begin | None) -> tuple[Episode, Play]:
    episode = Episode(group=0, sample=0, seed=7)
    if begin is not None:
        episode = branch_of(episode, begin)
    return episode, play_episode(episode, sampler, LIMITS, tokens, [None])


def test_a_branch_takes_the_turns_before_it_and_samples_the_next(tokens: TurnTokens) -> None:
    original, play = start(tokens, None)
    play.send(None)
    play.send(RESET)
    play.send(completion(tokens, "5"))
    asked = play.send(HIGHER)
    branch, again = start(tokens, make_begin(tokens, "5"))
    assert again.send(None).kind == "reset"
    assert again.send(RESET) == Ask("step", ("5",))
    request = again.send(HIGHER)
    assert isinstance(request, Sample) and request.token_ids == asked.token_ids
    assert branch.row == replace(original.row)
    again.send(completion(tokens, "6"))
    again.send(StepReply(reward=1.0, done=True))
    end(again, StepReply(done=True))
    assert [turn.text for turn in branch.turns] == ["5", "6"]
    assert sum(branch.row.reward_at.values()) == 1.25


def test_an_environment_that_is_put_into_a_state_plays_no_turn_again(tokens: TurnTokens) -> None:
    restore = Restore("somewhere:put", ("state",))
    begin = make_begin(tokens, "5", "6", restore=restore)
    branch, play = start(tokens, begin)
    assert play.send(None) == Ask("restore", (0, "somewhere:put", "state"))
    request = play.send(StepReply(messages=said("nobody reads this")))
    assert isinstance(request, Sample)
    assert [turn.reply for turn in branch.turns] == [HIGHER, LOWER]
    assert sum(branch.row.reward_at.values()) == 0.75
    assert play.send(completion(tokens, "7")) == Ask("step", ("7",))


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (replace(HIGHER, messages=said("lower")), "answered otherwise"),
        (replace(HIGHER, reward=0.0), "was paid 0.0, and 0.25 before"),
        (replace(HIGHER, done=True), "ended the episode"),
    ],
)
def test_a_branch_ends_where_a_turn_is_answered_otherwise(
    reply: StepReply, why: str, tokens: TurnTokens
) -> None:
    branch, play = start(tokens, make_begin(tokens, "5"))
    play.send(None)
    play.send(RESET)
    assert play.send(reply) == Ask("finish", ("max_turns",))
    end(play, StepReply(done=True))
    assert branch.ending == DIFFERS and why in branch.error and "turn 0" in branch.error


def test_a_branch_ends_where_the_reset_is_answered_otherwise(tokens: TurnTokens) -> None:
    branch, play = start(tokens, make_begin(tokens, "5"))
    play.send(None)
    play.send(StepReply(messages=said("guess guess")))
    end(play, StepReply(done=True))
    assert branch.ending == DIFFERS and "the reset" in branch.error
    assert [row.prompt_ids for row in branch.rows] == [[]]


def test_a_redraw_that_draws_the_same_ends_at_once(tokens: TurnTokens) -> None:
    own = completion(tokens, "6").token_ids
    for answer, ending in (("6", SAME), ("7", "")):
        branch, play = start(tokens, make_begin(tokens, "5", own_ids=own, redraws_one=True))
        play.send(None)
        play.send(RESET)
        play.send(HIGHER)
        request = play.send(completion(tokens, answer))
        assert request == Ask(*(("finish", ("max_turns",)) if ending else ("step", ("7",))))
        if ending:
            end(play, StepReply(done=True))
        assert branch.ending == ending


def test_a_branch_samples_no_more_than_its_tokens(tokens: TurnTokens) -> None:
    branch, play = start(tokens, make_begin(tokens, "5", max_tokens=3))
    play.send(None)
    play.send(RESET)
    assert play.send(HIGHER).sampling.max_tokens == 3
    sampled = completion(tokens, "6")
    play.send(sampled)
    request = play.send(LOWER)
    assert request.sampling.max_tokens == 3 - len(sampled.token_ids)
    play.send(completion(tokens, "6"))
    play.send(LOWER)
    end(play, StepReply(done=True))
    assert branch.ending == "overflow" and len(branch.turns) == 3


def test_a_branch_has_seeds_of_its_own_and_changes_no_other() -> None:
    info = {"seed": 3, "global_steps": 5}
    episode = Episode(group=1, sample=2)
    assert turn_seed(info, episode, 4) == seed_for(3, 5, 1, 2, 4)
    fresh = branch_of(episode, Begin(prefix=[], replies=[], word="0.1"))
    assert turn_seed(info, fresh, 0) == seed_for(3, 5, 1, 2, 0, "0.1") != seed_for(3, 5, 1, 2, 0)
    assert turn_seed(info, fresh, 4) == seed_for(3, 5, 1, 2, 4, "0.1")
    other = branch_of(episode, Begin(prefix=[], replies=[], word="0.2"))
    assert turn_seed(info, other, 4) != turn_seed(info, fresh, 4)


def test_a_redraw_shares_the_seeds_behind_its_turn(tokens: TurnTokens) -> None:
    info = {"seed": 3, "global_steps": 5}
    episode = Episode(group=1, sample=2, attempt=1)
    begin = make_begin(tokens, "5", redraws_one=True, attempt=1)
    redraw = branch_of(episode, begin)
    assert turn_seed(info, redraw, 1) != turn_seed(info, episode, 1)
    assert turn_seed(info, redraw, 2) == turn_seed(info, episode, 2)


class Kept(BranchRule):
    """Keeps each state."""

    def keeps(self, episode: Episode) -> Restore:
        return Restore("somewhere:take", ("snapshot",))


def test_states_are_kept_before_each_turn_that_an_environment_is_asked_for(
    tokens: TurnTokens,
) -> None:
    episode = Episode(group=0, sample=0, seed=7)
    play = play_episode(episode, sampler, LIMITS, tokens, [None], branches=Kept())
    play.send(None)
    assert play.send(RESET) == Ask("visit", ("somewhere:take", "snapshot"))
    assert isinstance(play.send(StepReply(said="s0")), Sample)
    play.send(completion(tokens, "5"))
    assert play.send(HIGHER).kind == "visit"
    play.send(StepReply(said="s1"))
    play.send(completion(tokens, "6"))
    assert play.send(StepReply(reward=1.0, done=True)).kind == "finish"
    assert episode.states == ["s0", "s1"]
    episode.restart()
    assert episode.states == []


def test_a_state_that_is_not_needed_is_not_asked_for(tokens: TurnTokens) -> None:
    class LaterOnes(Kept):
        def keeps(self, episode: Episode) -> Restore | None:
            return super().keeps(episode) if episode.turns else None

    episode = Episode(group=0, sample=0, seed=7)
    play = play_episode(episode, sampler, LIMITS, tokens, [None], branches=LaterOnes())
    play.send(None)
    assert isinstance(play.send(RESET), Sample)
    play.send(completion(tokens, "5"))
    assert play.send(HIGHER).kind == "visit"
    play.send(StepReply(said="s1"))
    assert episode.states == ["", "s1"]


def what_it_is(agent: Any, *words: str) -> str:
    return " ".join([type(agent).__name__, *words])


def test_a_server_calls_a_function_with_its_agent() -> None:
    server = EnvServer()
    server.agent = 3
    place = f"{__name__}:what_it_is"
    assert server.call("visit", (place, "a", "b")).said == "int a b"
    assert server.call("restore", (place,)).said == "int"
    assert server.call("visit", ("nowhere:what",)).failure == "env_crash"


def test_columns_are_those_of_each_rows_episode() -> None:
    class Numbers(BranchRule):
        def columns(self, episodes: Sequence[Episode]) -> dict[str, list[Any]]:
            return {"numbers": [[episode.group] for episode in episodes]}

    episodes = [Episode(group=group, sample=0) for group in (4, 5)]
    columns = branch_columns(Numbers(), episodes, np.array([0, 1, 1]))
    assert columns["numbers"].tolist() == [[4], [5], [5]]


def test_branches_of_episodes_that_may_ask_the_policy_are_refused(monkeypatch) -> None:
    """A record of a turn has no answers to what was asked in it."""
    brought = {"branches": [("branching", "")], "questions": [("policy_calls", "")]}
    monkeypatch.setattr("workers.rollout.branches.named", brought.__getitem__)
    refuse_questions(BranchRule(), None)
    refuse_questions(None, lambda *arguments: Questions())
    with pytest.raises(ValueError, match=r"features/branching.*features/policy_calls.*turn one"):
        refuse_questions(BranchRule(), lambda *arguments: Questions())
