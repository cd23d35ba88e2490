"""Which way to have a state again holds in a trial, and why others do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from custom.agent import AgentSpec
from features.branching.proof import Proved, in_one_line, prove, refusal, tell
from features.branching.settings import BranchingSettings
from tests.conftest import PROJECT
from tests.features.branching import games
from training.config import PPOConfig
from training.config.loader import load_config


@pytest.fixture(scope="module")
def config() -> PPOConfig:
    return load_config([str(PROJECT / "configs/quickstart.yaml")], check=False).config


def proved(config: PPOConfig, environment: Any, **settings: Any) -> Proved:
    spec = AgentSpec(environment, **settings.pop("spec", {}))
    return prove(config, spec, BranchingSettings(at=("every",), **settings), 3, None)


def test_a_snapshot_is_preferred_then_a_copy_then_playing_again(config: PPOConfig) -> None:
    assert proved(config, games.Held) == ("snapshot", {})
    way, reasons = proved(config, games.Plain)
    assert (way, reasons) == ("copy", {"snapshot": "Plain has no snapshot()"})
    way, reasons = proved(config, games.Uncopied)
    assert way == "replay" and "pickle" in reasons["copy"]


def test_a_way_that_is_asked_for_is_the_only_one(config: PPOConfig) -> None:
    for way in ("snapshot", "copy", "replay"):
        assert proved(config, games.Held, state=way) == (way, {})
    assert proved(config, games.Plain, state="snapshot").way == ""


def test_a_snapshot_that_lies_about_what_is_paid_at_the_end_is_found(config: PPOConfig) -> None:
    way, reasons = proved(config, games.Liar)
    assert way == "replay"
    assert "its reward" in reasons["snapshot"] and "cannot be copied" in reasons["copy"]


def test_no_state_of_an_environment_that_reads_the_clock_is_had_again(config: PPOConfig) -> None:
    found = proved(config, games.Clocked)
    assert found.way == "" and set(found.reasons) == {"snapshot", "copy", "replay"}
    assert "its reward" in found.reasons["replay"]
    sentence = refusal(AgentSpec(games.Clocked), found, BranchingSettings(at=("every",)))
    assert "every branch is refused" in sentence and "snapshot() and restore(bytes)" in sentence
    assert "\n" not in sentence and "branching.luck" not in sentence
    fresh = BranchingSettings(at=("every",), luck="fresh", state="copy")
    sentence = refusal(AgentSpec(games.Clocked), found, fresh)
    assert "branching.state=proved" in sentence and "branching.luck=same" in sentence


def test_a_snapshot_that_is_there_and_does_not_hold_is_a_warning(
    config: PPOConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for environment in (games.Plain, games.Text):
        found = proved(config, environment)
        tell(AgentSpec(environment), found, BranchingSettings(at=("every",)))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "\n" not in caplog.messages[0] + caplog.messages[1]


def test_an_error_is_told_in_one_line_with_its_place() -> None:
    trace = 'Traceback (most recent call last):\n  File "mine.py", line 8, in restore\n    f()\n'
    assert (
        in_one_line(f"KeyError: 3\n{trace}") == 'KeyError: 3 (File "mine.py", line 8, in restore)'
    )
    assert in_one_line("the process died") == "the process died"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (games.Heavy, "branching.max_state_mb allows 1"),
        (games.Text, "returned a str; allowed: bytes"),
        (games.Empty, "returned a NoneType; allowed: bytes"),
        (games.BadRestore, "restore failed (env_crash)"),
    ],
)
def test_a_snapshot_that_cannot_be_is_left_for_a_copy(
    environment: Any, reason: str, config: PPOConfig
) -> None:
    way, reasons = proved(config, environment, max_state_mb=1)
    assert way == "copy" and reason in reasons["snapshot"]


def test_agents_with_a_state_of_their_own_are_played_again(config: PPOConfig) -> None:
    way, reasons = proved(config, games.Held, spec={"tools": ("calculator",)})
    assert way == "replay" and "tools" in reasons["copy"]


def test_luck_is_drawn_anew_only_where_the_environment_can(config: PPOConfig) -> None:
    assert proved(config, games.Held, luck="fresh").way == "snapshot"
    found = proved(config, games.Plain, luck="fresh")
    assert found.way == "" and "reseed" in found.reasons["copy"]
    assert "episode's own luck" in found.reasons["replay"]


@pytest.mark.seconds
def test_states_go_from_one_process_to_another(config: PPOConfig, tmp_path: Path) -> None:
    words = [str(PROJECT / "configs/quickstart.yaml"), "agent.environment.isolation=process"]
    in_processes = load_config(words, check=False).config
    assert proved(in_processes, games.Held) == ("snapshot", {})
    assert proved(in_processes, games.Plain).way == "copy"


def test_states_that_games_share_are_found(config: PPOConfig) -> None:
    found = proved(config, games.Global)
    assert found.way == "" and "text" in found.reasons["snapshot"] + found.reasons["copy"]
    way, reasons = proved(config, games.Filed)
    assert way == "replay" and "its text was" in reasons["copy"]


def test_a_reset_that_draws_for_itself_needs_a_snapshot(config: PPOConfig) -> None:
    assert proved(config, games.Drawn).way == "snapshot"
    found = proved(config, games.Drawn, state="replay")
    assert found.way == "" and "when it was played again" in found.reasons["replay"]


def test_an_environment_that_crashes_now_and_then_is_tried_again(
    config: PPOConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A crash in the first episode of the trial.
    monkeypatch.setattr(games.Crashing, "steps", 17)
    assert proved(config, games.Crashing, trial_episodes=1).way == "snapshot"
    assert "step failed (env_crash)" in caplog.text and "tried again" in caplog.text


@pytest.mark.seconds
def test_a_restore_that_hangs_is_left_for_a_copy() -> None:
    words = [str(PROJECT / "configs/quickstart.yaml"), "agent.step_timeout_s=0.3"]
    found = proved(load_config(words, check=False).config, games.Hanging)
    assert found.way == "copy" and "restore failed (env_timeout)" in found.reasons["snapshot"]
