"""The trial before a run: what each player is paid, and what is said of it."""

from __future__ import annotations

import logging
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from custom.agent import Agent, AgentSpec
from custom.env import BaseEnvironment
from custom.trial import GARBAGE, Trial, play_trial
from data.watchdog import ATTEMPT
from training import environment_trial
from training.config import AgentConfig, DataConfig, PPOConfig
from training.config.loader import ConfigError
from training.environment_trial import report_trial, try_agents
from workers.environments import pool


class Marathon(BaseEnvironment):
    """Every readable step costs 1; the game pays 5 after six of them."""

    max_turns = 6

    def __init__(self, invalid_reward: float = 0.0, pays: float = 0.0) -> None:
        super().__init__()
        self.invalid_reward, self.pays = invalid_reward, pays

    def reset(self, seed: int | None = None) -> str:
        self.left = 6
        return "go left or right"

    def step(self, action: str) -> tuple[Any, ...]:
        if action not in ("left", "right"):
            return "left or right?", self.invalid_reward, False, {"valid": False}
        self.left -= 1
        return "go on", -1.0 + (self.pays if self.left == 0 else 0.0), self.left == 0, {}

    def sample_action(self, generator: random.Random) -> str:
        return generator.choice(["left", "right"])


class Choosy(BaseEnvironment):
    """Knows one word, and raises at all others."""

    def reset(self, seed: int | None = None) -> str:
        return "hello"

    def step(self, action: str) -> tuple[Any, ...]:
        if action != "hello":
            raise KeyError(action)
        return "hello", 1.0, True, {}


def rewards(trial: Trial) -> dict[str, float]:
    return {player: outcome.reward for player, outcome in trial.outcomes.items()}


def test_each_player_gets_what_the_game_pays_it() -> None:
    trial = play_trial(Agent(Marathon()), seed=0, episodes=3, max_turn=4)
    assert rewards(trial) == {"random": -4.0, "garbage": 0.0, "quitting": -1.0, "cut": -1.0}
    assert {player: outcome.turns for player, outcome in trial.outcomes.items()} == {
        "random": 4,
        "garbage": 4,
        "quitting": 4,
        "cut": 1,
    }
    assert trial.samples_actions and trial.max_turns == 6
    assert all(
        outcome.episodes == 3 and outcome.crashes == 0 for outcome in trial.outcomes.values()
    )


def test_a_reward_function_gives_the_trials_rewards_too() -> None:
    endings: list[str] = []

    def reward_fn(trajectory: Any) -> float:
        endings.append(trajectory.ending)
        return float(len(trajectory))

    trial = play_trial(Agent(Marathon(), reward_fn=reward_fn), seed=0, episodes=1, max_turn=9)
    assert rewards(trial) == {"random": 6, "garbage": 9, "quitting": 9, "cut": 1}
    assert endings == ["done", "max_turns", "max_turns", "overflow"]


def test_an_environment_that_raises_is_counted_with_its_first_error() -> None:
    trial = play_trial(Agent(Choosy()), seed=0, episodes=4, max_turn=3)
    # Its own word is drawn from what it says.
    assert trial.outcomes["random"].crashes == 0 and trial.outcomes["random"].reward == 1.0
    assert trial.outcomes["garbage"].crashes == 4 and "KeyError" in trial.outcomes["garbage"].error
    assert all(word != "hello" for word in GARBAGE)
    assert not trial.samples_actions


def said(caplog: pytest.LogCaptureFixture, environment: BaseEnvironment, **agent: Any) -> str:
    config = PPOConfig(agent=AgentConfig(max_turn=4, trial_episodes=2, **agent))
    trial = play_trial(Agent(environment), seed=0, episodes=2, max_turn=4)
    with caplog.at_level(logging.INFO):
        caplog.clear()
        report_trial(config, trial, "Marathon", 4)
    return "\n".join(f"{record.levelname} {record.getMessage()}" for record in caplog.records)


def test_where_not_playing_pays_more_a_warning_gives_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = said(caplog, Marathon())
    assert "WARNING Marathon pays 0 for unreadable ones and -4 for random answers" in text
    assert (
        "WARNING Marathon pays -1 for one and then no room for more and -4 for random answers"
        in text
    )
    assert "change agent.overflow_reward to -3 or less" in text
    assert (
        "INFO trial of Marathon, 2 episodes of each player: mean reward of random answers -4 in 4 "
        "turns" in text
    )


def test_where_playing_pays_at_least_as_much_there_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = said(caplog, Marathon(invalid_reward=-1.0), overflow_reward=-3.0)
    assert (
        "learn not to play" not in text
        and "INFO trial of Marathon, 2 episodes of each player" in text
    )


def test_a_game_that_outlasts_the_turns_is_named_with_both_numbers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "WARNING Marathon may last 6 turns, agent.max_turn=4 ends it before" in said(
        caplog, Marathon()
    )


class Sly(BaseEnvironment):
    """Draws its task from a generator of the seed, as most do.

    The player must not draw from an equal one.
    """

    def reset(self, seed: int | None = None) -> str:
        self.target = random.Random(seed).randint(1, 10)
        return "guess"

    def step(self, action: str) -> tuple[Any, ...]:
        return "no", float(action == str(self.target)), False, {}

    def sample_action(self, generator: random.Random) -> str:
        return str(generator.randint(1, 10))


def test_the_random_player_does_not_share_the_environments_draws() -> None:
    trial = play_trial(Agent(Sly()), seed=0, episodes=20, max_turn=1)
    assert trial.outcomes["random"].reward < 0.5


class Forgetful(Sly):
    """Begins alike, and hides another number at each reset."""

    def reset(self, seed: int | None = None) -> str:
        self.hidden = random.SystemRandom().randint(1, 10**9)
        return super().reset(seed)

    def step(self, action: str) -> tuple[Any, ...]:
        return f"it was {self.hidden}", 0.0, False, {}


def test_a_game_that_differs_under_one_seed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    assert "differs under one seed" in said(caplog, Forgetful())
    assert "differs" not in said(caplog, Sly())


class Moody(Marathon):
    """Crashes in its second task."""

    def reset(self, seed: int | None = None) -> str:
        self.bad = seed == 1
        return super().reset(seed)

    def step(self, action: str) -> tuple[Any, ...]:
        if self.bad:
            raise RuntimeError("not today")
        return super().step(action)


def test_crashed_episodes_are_no_part_of_the_means() -> None:
    trial = play_trial(Agent(Moody()), seed=0, episodes=2, max_turn=4)
    assert rewards(trial) == {"random": -4.0, "garbage": 0.0, "quitting": -1.0, "cut": -1.0}
    assert all(outcome.crashes == 1 for outcome in trial.outcomes.values())


def test_without_an_action_of_its_own_the_trial_says_that_it_shows_little(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent(BaseEnvironment):
        def reset(self, seed: int | None = None) -> str:
            return "say the word"

        def step(self, action: str) -> tuple[Any, ...]:
            return "that is not it", float(action == "xyzzy"), False, {}

    assert "has no sample_action(generator)" in said(caplog, Silent())
    assert "has no sample_action(generator)" not in said(caplog, Marathon())


def tried(
    caplog: pytest.LogCaptureFixture, game: Path, environment: type, **data: Any
) -> list[str]:
    """Returns the warnings of a trial before a run, for which nothing but a tokenizer is loaded."""
    caplog.clear()
    config = PPOConfig(data=DataConfig(**data), agent=AgentConfig(max_turn=4, trial_episodes=1))
    tokenizer = AutoTokenizer.from_pretrained(game / "model")
    try_agents(config, [AgentSpec(environment)], tokenizer)
    of_trial = [record for record in caplog.records if record.name == "training.environment_trial"]
    return [record.getMessage() for record in of_trial if record.levelno == logging.WARNING]


def test_crashes_in_a_part_of_the_trial_are_counted(
    caplog: pytest.LogCaptureFixture, tiny_game: Path
) -> None:
    (*_, warning) = tried(caplog, tiny_game, Choosy)
    assert warning.startswith("environment Choosy crashed in 1 of 4 trial episodes: KeyError")


class Greeting(BaseEnvironment):
    """Greets in words, some of which the quickstart's tokenizer has."""

    def reset(self, seed: int | None = None) -> str:
        return "the number is unknown to me"

    def step(self, action: str) -> tuple[Any, ...]:
        return "lower", float(action == "1"), True, {}


def test_words_that_the_tokenizer_lacks_are_named_before_the_run(
    caplog: pytest.LogCaptureFixture, tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (warning, *_) = tried(caplog, tiny_game, Greeting)
    assert warning == (
        "Greeting: the model's tokenizer does not know 3 of the 6 words of a first prompt "
        "(unknown, to, me): it reads them all as <unk>, and can write none of them. "
        "Where examples/prepare_game.py made the model, delete its folder, "
        "actor_rollout_ref.model.path=None, and run that program again; else give a model whose "
        "tokenizer has these words"
    )
    monkeypatch.setattr(Greeting, "reset", lambda self, seed: "the number is 3")
    assert not any("does not know" in text for text in tried(caplog, tiny_game, Greeting))


def test_answers_that_the_tokenizer_cannot_write_are_named_before_the_run(
    caplog: pytest.LogCaptureFixture, tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Greeting, "reset", lambda self, seed: "the number is 3")
    draw = lambda self, generator: "guess north"  # noqa: E731
    monkeypatch.setattr(Greeting, "sample_action", draw, raising=False)
    found = [text for text in tried(caplog, tiny_game, Greeting) if "does not know" in text]
    (warning,) = found
    assert warning.startswith(
        "Greeting: the model's tokenizer does not know 1 of the 2 words of the answers that "
        "sample_action drew (north): it reads them all as <unk>, and can write none of them. "
    )
    monkeypatch.setattr(Greeting, "sample_action", lambda self, generator: "guess 3")
    assert not any("does not know" in text for text in tried(caplog, tiny_game, Greeting))


class Hanging(BaseEnvironment):
    """Never answers."""

    def reset(self, seed: int | None = None) -> str:
        return "hello"

    def step(self, action: str) -> tuple[Any, ...]:
        while True:
            time.sleep(0.01)


def trial_problems(
    game: Path, environment: type | str, monkeypatch: pytest.MonkeyPatch, **agent: Any
) -> list[str]:
    """Returns why a run with an environment may not begin; a trial may take half a second."""
    monkeypatch.setattr(pool, "MAX_TRIAL_S", 0.25)
    monkeypatch.setattr(environment_trial, "LONG_S", 0.2)
    monkeypatch.setattr(pool, "POLL_S", 0.1)
    settings = AgentConfig(max_turn=4, trial_episodes=1, step_timeout_s=0.25, **agent)
    tokenizer = AutoTokenizer.from_pretrained(game / "model")
    try:
        try_agents(PPOConfig(agent=settings), [AgentSpec(environment)], tokenizer)
    except ConfigError as error:
        return error.problems
    return []


@pytest.mark.seconds
def test_a_trial_that_hangs_is_a_problem_that_names_file_line_and_setting(
    caplog: pytest.LogCaptureFixture,
    tiny_game: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "lift.py"
    file.write_text(
        "import time\nfrom custom.env import BaseEnvironment\n\n\n"
        "class Lift(BaseEnvironment):\n    def reset(self, seed=None):\n        return 'hello'\n\n"
        "    def step(self, action):\n        while True:\n            time.sleep(0.01)\n"
    )
    (problem,) = trial_problems(tiny_game, f"{file}:Lift", monkeypatch)
    assert problem.startswith(f"environment {file}:Lift hung in its trial: trial was still running")
    assert re.search(
        rf"in {file}:1[01]; .*agent.step_timeout_s=0.25; so it did with another seed; "
        "agent.trial_episodes=0",
        problem,
    )
    assert re.search(
        rf"the trial of environment {file}:Lift takes long: .*{file}:1[01]", caplog.text
    )


@pytest.mark.seconds
@pytest.mark.parametrize("tolerated", ["by its rate", "when started again"])
def test_a_trial_that_hangs_may_be_a_warning(
    tolerated: str,
    caplog: pytest.LogCaptureFixture,
    tiny_game: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rate = 1.0 if tolerated == "by its rate" else 0.5
    if tolerated == "when started again":
        monkeypatch.setenv(ATTEMPT, "2")
    assert trial_problems(tiny_game, Hanging, monkeypatch, max_failure_rate=rate) == []
    assert "environment Hanging hung in its trial" in caplog.text


@pytest.mark.seconds
def test_an_environment_that_crashes_whenever_it_is_played_is_a_problem(
    tiny_game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Marathon):
        def step(self, action: str) -> tuple[Any, ...]:
            if action not in ("left", "right"):
                return "left or right?", 0.0, True, {}
            raise NameError("txt")

    (problem,) = trial_problems(tiny_game, Broken, monkeypatch)
    assert problem.startswith(
        "environment Broken crashed in 3 of 4 trial episodes, in all that began with a random "
        "answer (what it cannot read it must answer, not raise; agent.max_failure_rate=1 trains "
        "all the same): NameError: txt\n"
    )


def test_an_observation_that_leaves_no_room_for_a_second_turn_is_named(
    caplog: pytest.LogCaptureFixture, tiny_game: Path
) -> None:
    class Wordy(Marathon):
        def step(self, action: str) -> tuple[Any, ...]:
            return "higher lower higher lower", 0.0, False, {}

    text = (
        "Wordy: no second turn fits: an observation has about 4 tokens, and "
        "data.max_response_length=4 is for all turns and observations together"
    )
    assert text in tried(caplog, tiny_game, Wordy, max_response_length=4)
    assert text not in tried(caplog, tiny_game, Wordy, max_response_length=5)


class Flat(Marathon):
    """Pays the same, whatever is said."""

    paid = 0.01

    def step(self, action: str) -> tuple[Any, ...]:
        return "done", self.paid, True, {}


def test_a_game_that_pays_every_answer_alike_is_named(caplog: pytest.LogCaptureFixture) -> None:
    words = "for each random answer, and as much for an unreadable one: no answer that was tried"
    assert f"WARNING Marathon paid 0.01 {words} is better than another" in said(caplog, Flat())
    # Random answers win few games: 0 is said, and no warning.
    Flat.paid = 0.0
    assert f"INFO Marathon paid 0 {words}" in said(caplog, Flat())
    assert words not in said(caplog, Marathon())
