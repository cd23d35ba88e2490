"""What is asked wrongly, or by what dies, ends in a sentence, and costs its episode alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.features.policy_calls.test_calls import Played, config_of, spec  # noqa: F401
from training.config import EnvironmentChoice
from workers.environments.names import CannotBuild

SENTENCES = {
    "nothing": "give a text, or one message or more",
    "number": "was given 5 (int); allowed: a text, or a list of messages",
    "role": "was given the message {'role': 'critic', 'content': 'guess'} (dict); allowed",
    "content": "'content': None} (dict); allowed: {'role': one of system, user",
    "max_tokens": "given max_tokens=0 (int); allowed: 1 or more, or None",
    "name": "allowed: a text of 1 to 200 characters",
    "unprintable": "characters that can be printed",
    "train": "given train='false' (str); allowed: True or False",
    "a text": "policy.ask_all was given 'guess' (str); allowed: a list of questions",
    "group": "data.max_prompt_length",
    "nan": "returned the reward nan (float); allowed: a finite number",
    "masked": "bears no reward: ask with train=True",
    "task": "give a text, or one message or more",
    "gathered": "data.max_prompt_length",
}


def faulty(fault: str) -> Any:
    config = config_of("Faulty", on_failure="zero")
    choice = config.agent.environment
    with_fault = EnvironmentChoice(
        path=choice.path, cls=choice.cls, isolation="thread", kwargs={"fault": fault}
    )
    from dataclasses import replace

    return replace(config, agent=replace(config.agent, environment=with_fault))


@pytest.mark.parametrize("fault", SENTENCES)
def test_what_is_asked_wrongly_is_a_crash_with_a_sentence(spec: Any, fault: str) -> None:  # noqa: F811
    [episode] = Played(spec, faulty(fault), episodes=1, n=1).episodes
    assert episode.ending == "env_crash"
    assert SENTENCES[fault] in episode.error.splitlines()[0]


def test_a_reply_of_another_episode_is_not_paid(spec: Any) -> None:  # noqa: F811
    played = Played(spec, config_of("Forgetful", on_failure="zero"), episodes=4, n=1)
    # The episodes of a process share what its classes keep.
    failed = [each for each in played.episodes if each.ending == "env_crash"]
    assert failed
    assert all("the episode of this reply is over" in each.error for each in failed)


@pytest.mark.seconds
def test_an_environment_that_dies_while_it_waits_costs_its_episode(spec: Any) -> None:  # noqa: F811
    config = config_of("Dies", home="process", on_failure="zero")
    played = Played(spec, config, episodes=2, n=1)
    for episode in played.episodes:
        assert episode.ending == "env_crash"
        assert "the environment's process ended during" in episode.error


@pytest.mark.parametrize("home", ["thread", "process"])
def test_what_is_given_up_ends_though_it_catches_everything(spec: Any, home: str) -> None:  # noqa: F811
    calls = {"max_calls": 2, "max_refused": 3}
    config = config_of("Deaf", home=home, calls=calls, on_failure="zero")
    [episode] = Played(spec, config, episodes=1, n=1).episodes
    assert episode.ending == "env_timeout" and "policy_calls.max_refused" in episode.error


def test_an_environment_that_asks_as_it_is_made_cannot_be_built(spec: Any) -> None:  # noqa: F811
    with pytest.raises(CannotBuild, match="the policy cannot be asked in build"):
        Played(spec, config_of("InBuild"), episodes=1, n=1)
