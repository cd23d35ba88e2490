"""Requests of a program that are sampled and not trained: a client's helpers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from features.programs.exchange import Asked, AskedCompletion, Exited, Rewarded
from features.programs.helper_requests import is_helper
from features.programs.play import ProgramEpisode
from features.programs.spec import ProgramSpec
from tests.features.programs.test_pool import play, pool_of
from tests.features.programs.test_trial import tried  # noqa: F401
from tests.unit.test_turn_tokens import turn_tokens
from training.config.loader import ConfigError, load_config
from workers.environments.reply import StepReply
from workers.rollout.engine import Completion, Sampling
from workers.rollout.episode import Episode, TurnLimits

LIMITS = TurnLimits(prompt_length=300, response_length=300, max_model_len=600)
USER = {"role": "user", "content": "Two and two?"}
YES = {"role": "assistant", "content": "Yes."}
TITLE = {"role": "system", "content": "Write a short title."}


@pytest.mark.parametrize(
    ("settings", "helpers"),
    [
        ({}, []),
        ({"train_models": ("policy",)}, ["gpt-4o-mini", "gpt-4o", "Policy"]),
        ({"train_models": ("policy", "gpt-4o*")}, ["Policy"]),
        ({"train_models": ("gpt-4o",)}, ["policy", "gpt-4o-mini", "Policy"]),
    ],
)
def test_what_names_another_model_is_a_helper(
    settings: Mapping[str, tuple[str, ...]], helpers: list[str]
) -> None:
    patterns = {"train_models": (), "helper_prompts": ()} | dict(settings)
    names = ("policy", "gpt-4o-mini", "gpt-4o", "Policy")
    found = [
        name
        for name in names
        if is_helper(AskedCompletion(messages=[USER], model=name), **patterns)
    ]
    assert found == helpers


def test_what_has_a_helpers_system_text_is_one() -> None:
    prompts = ("short title", "^You name")
    for messages, expected in (
        ([TITLE, USER], True),
        ([USER], False),
        ([{"role": "system", "content": "Be brief.\nYou name files."}, USER], False),
        ([{"role": "user", "content": "a short title"}], False),
        ([{"role": "system", "content": "You name files."}, USER], True),
    ):
        asked = AskedCompletion(messages=messages)
        assert is_helper(asked, ("policy",), prompts) == expected
    assert not is_helper(AskedCompletion(prompt_ids=(1, 2)), (), prompts)


class Talk:
    """Plays an episode whose policy says Yes."""

    def __init__(self) -> None:
        self.tokens = turn_tokens("smollm2")
        self.episode = Episode(group=0, sample=0)
        self.number = 0
        self.seeds: list[int | None] = []
        self.given: list[list[int]] = []

        def sampler(episode: Episode, turn: int | None = None) -> Sampling:
            self.seeds.append(turn)
            return Sampling(max_tokens=20, seed=turn)

        self.play: Iterator[Any] = ProgramEpisode(self.episode, sampler, LIMITS, self.tokens).play()
        next(self.play)

    def ask(self, *messages: dict[str, Any], **more: Any) -> None:
        self.number += 1
        asked = Asked(number=self.number, messages=list(messages), **more)
        request = self.play.send(asked).sample
        self.given.append(request.token_ids)
        ids = self.tokens.tokenizer.encode("Yes.<|im_end|>", add_special_tokens=False)
        self.play.send(
            Completion(
                request_id=f"0.{request.number}",
                token_ids=ids,
                log_probs=[-1.0] * len(ids),
                finish_reason="stop",
            )
        )

    def end(self, reward: float | None = None) -> None:
        self.play.send(Exited(reward=reward))
        with pytest.raises(StopIteration):
            self.play.send(StepReply(done=True))

    def spans(self) -> list[list[tuple[int, float]]]:
        """Lists each row's sampled turns with what they earned."""
        return [
            [(span.turn, row.reward_at.get(span.end - 1, 0.0)) for span in row.spans]
            for row in self.episode.rows
        ]


def test_a_helpers_answer_is_sampled_and_no_row_has_it() -> None:
    talk = Talk()
    talk.ask(TITLE, USER, trained=False)
    talk.ask(USER)
    talk.ask(TITLE, USER, YES, USER, trained=False)
    talk.ask(USER, YES, USER)
    talk.ask(TITLE, USER, trained=False)
    talk.end(1.0)
    assert talk.spans() == [[(1, 0.0), (3, 1.0)]]
    assert talk.episode.initial_messages == [USER]
    counts = talk.episode.program["counts"]
    assert (counts["requests"], counts["helpers"]) == (5, 3)


def test_rewards_are_the_policys_alone() -> None:
    talk = Talk()
    talk.ask(TITLE, USER, trained=False)
    talk.play.send(Rewarded(reward=8.0))
    talk.ask(USER)
    talk.ask(TITLE, USER, YES, USER, trained=False)
    talk.play.send(Rewarded(reward=0.25))
    talk.play.send(Rewarded(reward=4.0, number=3))
    talk.ask(TITLE, USER, trained=False, reward=0.5)
    talk.end(None)
    assert talk.spans() == [[(1, 0.75)]]


def test_an_episode_is_sampled_alike_with_helpers_and_without() -> None:
    seeds = []
    for with_helpers in (False, True):
        talk = Talk()
        main = []
        for messages in ([USER], [USER, YES, USER]):
            if with_helpers:
                talk.ask(TITLE, *messages, trained=False)
                talk.ask(*messages, trained=False)
            talk.ask(*messages)
            main.append((talk.seeds[-1], talk.given[-1]))
        talk.end(None)
        seeds.append((main, talk.spans()[0][0][1], [list(row.ids) for row in talk.episode.rows]))
    assert seeds[0][0] == seeds[1][0]
    assert seeds[0][2] == seeds[1][2]


@pytest.mark.parametrize("first_is_trained", [False, True])
def test_a_conversation_that_both_have_is_trained_where_the_policy_speaks(
    first_is_trained: bool,
) -> None:
    talk = Talk()
    talk.ask(USER, trained=first_is_trained)
    talk.ask(USER, YES, USER, trained=not first_is_trained)
    talk.ask(USER, YES, USER, YES, USER, trained=first_is_trained)
    whole = list(talk.given[-1])
    talk.end(1.0)
    if first_is_trained:
        # The first row is the policy's; the third request forked from the helper's.
        assert talk.spans() == [[(0, 0.0)], [(2, 1.0)]]
        assert talk.episode.rows[1].token_ids[: len(whole)] == whole
    else:
        assert talk.spans() == [[(1, 1.0)]]
    for row in talk.episode.rows:
        sampled = sum(span.end - span.start for span in row.spans)
        assert sum(value != 0 for value in row.log_probs) == sampled


def test_an_episode_of_helpers_alone_trains_nothing() -> None:
    talk = Talk()
    talk.ask(USER, trained=False)
    talk.end(1.0)
    [row] = talk.episode.rows
    assert not row.spans and not row.prompt_ids


ASKS = """
import json, os, urllib.request
def ask(model, *messages):
    body = json.dumps({"model": model, "messages": list(messages)}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request).read()
user = {"role": "user", "content": "Hello"}
ask("mini", user)
ask("policy", {"role": "system", "content": "A short title"}, user)
ask("policy", user)
print(1.0)
"""
JUDGE = "def compute_score(conversations): return len(conversations)"


def test_a_request_says_whether_it_is_trained_and_a_judge_sees_no_helpers(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(ASKS)
    (tmp_path / "judge.py").write_text(JUDGE)
    spec = ProgramSpec(
        command=(sys.executable, str(tmp_path / "agent.py")),
        train_models=("policy",),
        helper_prompts=("title",),
        reward_path=str(tmp_path / "judge.py"),
        reward_name="compute_score",
    )
    with pool_of(spec) as pool:
        told = play(pool)
    asked = [(heard.model, heard.trained) for heard in told if isinstance(heard, Asked)]
    assert asked == [("mini", False), ("policy", False), ("policy", True)]
    assert told[-1].reward == 1.0


@pytest.mark.parametrize("model", ["policy", "gpt-4o"])
def test_a_program_of_which_nothing_is_trained_is_refused(tried: Any, model: str) -> None:  # noqa: F811
    body = json.dumps({"model": model, "messages": [USER]})
    script = f"from faulty import post\npost('/chat/completions', {body.encode()!r})\nprint(1.0)"
    problems = tried(script, train_models=("policy",))
    if model == "policy":
        assert problems == []
        return
    [problem] = problems
    assert "models ['gpt-4o']: programs.train_models=['policy']" in problem


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["programs.command=true", "programs.helper_prompts=['a(b']"], "no regular expression"),
        (["programs.train_models=[policy]"], "set programs.command"),
    ],
)
def test_settings_that_mean_nothing_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config([*words, "algorithm.adv_estimator=grpo"])
