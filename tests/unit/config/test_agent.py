"""Tests the checks of agents, environments and tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.helpers import assert_refused, checked, load, warned

GAME = "agent.environment.name=custom.envs.guess_number:GuessNumber"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["agent.observation_loss_coef=0.5"],
            "agent.observation_loss_coef=0.5 learns what environments say, and there is none",
        ),
        (
            [GAME, "agent.max_turn_tokens=513"],
            "agent.max_turn_tokens=513 is above data.max_response_length=512, which holds all "
            "turns",
        ),
        (
            ["env_template=[{name: 'custom.envs.guess_number:GuessNumber', max_turn_tokens: 600}]"],
            "env_template[0].max_turn_tokens=600 is above data.max_response_length=512, which "
            "holds all turns",
        ),
    ],
)
def test_an_agent_that_lacks_something_is_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_entries_of_env_template_are_checked_like_other_keys(runnable: list[str]) -> None:
    good = "{path: mine.py, cls: Coin, kwargs: {sides: 3}}"
    assert load(f"env_template=[{good}]").environments[0].kwargs == {"sides": 3}
    for entry, wanted in {
        "{pth: mine.py}": (
            "env_template[0].pth='mine.py' (command line): there is no such key. "
            "Did you mean 'path'?"
        ),
        "{path: mine.py, kwargs: 5}": "env_template[0].kwargs=5 (command line): must be a mapping",
        "{path: mine.py, isolation: process}": (
            "isolation is one for all environments: set agent.environment.isolation"
        ),
    }.items():
        assert any(wanted in problem for problem in checked(runnable, f"env_template=[{entry}]")), (
            entry
        )


COIN = """
from dataclasses import dataclass

from custom.env import BaseEnvironment, EnvironmentConfig


@dataclass
class CoinConfig(EnvironmentConfig):
    sides: int = 2


class Coin(BaseEnvironment):
    config_cls = CoinConfig

    def __init__(self, config=None):
        raise RuntimeError("nobody makes one while a config is checked")

    def reset(self):
        return ""

    def step(self, action):
        return "", 0.0, True, {}


weight = 3
"""


def test_a_users_environment_tools_and_agent_are_looked_up_before_anything_starts(
    runnable: list[str], tmp_path: Path
) -> None:
    (tmp_path / "coin.py").write_text(COIN)
    base = [*runnable[:1], *runnable[3:], f"agent.environment.path={tmp_path / 'coin.py'}"]
    game, kwargs = [*base, "agent.environment.cls=Coin"], "agent.environment.kwargs"
    assert checked(game) == checked(game, f"{kwargs}.sides=3", "agent.tools=[calculator]") == []
    wrong = {
        f"{kwargs}.side=3": f"{kwargs}: Coin takes (sides: int = 2), not ['side']: ",
        "agent.environment.cls=Koin": (
            f"agent.environment.cls=Koin: {tmp_path / 'coin.py'} does not define 'Koin'; it has: "
        ),
        "agent.environment.cls=weight": "it must be a function or a class",
        "agent.tools=[calculater]": (
            "agent.tools: 'calculater' is unknown; allowed: calculator, python, environment_step, "
            "/path/to/file.py:name, module:name, tools.yaml. Did you mean 'calculator'?"
        ),
        f"agent.tools=[{tmp_path / 'coin.py'}:Hammer]": "does not define 'Hammer'",
        f"agent.tools=[{tmp_path / 'gone.yaml'}]": "gone.yaml",
    }
    for override, wanted in wrong.items():
        (problem,) = checked(game, override)
        assert wanted in problem
    for own in ("agent.cls", "agent.suite"):
        (problem,) = checked(game, f"{own}.path={tmp_path / 'coin.py'}", f"{own}.name=Mine")
        assert problem.startswith(f"{own}.name=Mine: {tmp_path / 'coin.py'} does not define 'Mine'")
    (tmp_path / "coin.py").rename(tmp_path / "other.py")
    assert any("is not a file" in problem for problem in checked(game))


def test_an_environment_of_a_module_is_looked_up_too(runnable: list[str]) -> None:
    base = [*runnable[:1], *runnable[3:]]
    good = "agent.environment.name=custom.envs.guess_number:GuessNumber"
    assert checked(base, good) == []
    (problem,) = checked(base, f"{good}s")
    assert "the module does not define 'GuessNumbers'" in problem
    (problem,) = checked(base, good, "agent.environment.kwargs.lowst=1")
    assert "agent.environment.kwargs: GuessNumber" in problem


def test_a_turn_may_be_as_long_as_all_turns_together(runnable: list[str]) -> None:
    assert checked(runnable, GAME, "agent.max_turn_tokens=512") == []
    # Nothing acts, and nothing reads it.
    assert checked(runnable, "agent.max_turn_tokens=513") == []


def test_an_environment_without_a_deadline_is_a_warning_where_it_shares_our_process(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (Path(runnable[0].split("=")[1]) / "mine.py").write_text(
        "class Mine:\n    def reset(self): ...\n    def step(self, action): ...\n"
    )
    mine = [
        f"agent.environment.path={runnable[0].split('=')[1]}/mine.py",
        "agent.environment.cls=Mine",
    ]
    no_deadline = "agent.step_timeout_s=null"
    assert warned(caplog, runnable, *mine, no_deadline) == [
        "agent.step_timeout_s=null with isolation=thread: an environment that hangs stops the run; "
        "give a deadline here or in agent.episode_timeout_s"
    ]
    for protection in ("agent.episode_timeout_s=60", "agent.environment.isolation=process"):
        assert warned(caplog, runnable, *mine, no_deadline, protection) == []


def test_messages_are_not_kept_where_an_environment_tells_them(
    runnable: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert warned(caplog, runnable, "data.return_raw_chat=true") == []
    assert warned(caplog, runnable, "data.return_raw_chat=true", GAME) == [
        "data.return_raw_chat=true has no effect with an environment: records of episodes "
        "keep conversations"
    ]
