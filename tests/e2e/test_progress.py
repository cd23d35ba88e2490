"""Tests that the driver shows how far a long generation is, which plays here or on ranks."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tests.e2e.test_agents import game_config
from training.building import build_trainer
from training.run import progress

SLOW = """
import time
from custom.env import BaseEnvironment
class Slow(BaseEnvironment):
    def reset(self, seed=None):
        return "guess"
    def step(self, action):
        time.sleep(SECONDS)
        return "higher", 1.0, True, {}
"""
LINE = re.compile(r"(step 1|validation): (\d+) of (\d+) episodes, .* slowest runs for \d+ s")


class Messages(logging.Handler):
    """Keeps what a logger says, whatever happens to the handlers above it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a record's text."""
        self.texts.append(record.getMessage())


def lines_of(config: object, caplog: pytest.LogCaptureFixture) -> set[tuple[str, int]]:
    """Trains; returns what the lines of progress are of, and how many episodes they tell of."""
    caplog.set_level(logging.INFO, logger="training.run.progress")
    logger = logging.getLogger("training.run.progress")
    assert not logger.disabled, "a test before has switched the logger off"
    messages = Messages()
    logger.addHandler(messages)
    trainer = build_trainer(config)
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
        logger.removeHandler(messages)
    assert logging.root.manager.disable < logging.INFO, "a test before has switched logging off"
    found = [LINE.match(message) for message in messages.texts]
    assert all(int(match[2]) <= int(match[3]) for match in found if match)
    return {(match[1], int(match[3])) for match in found if match}


def slow_game(folder: Path, seconds: float) -> tuple[str, ...]:
    """Returns the settings of a run of one step, in which every turn takes so many seconds."""
    (folder / "slow.py").write_text(SLOW.replace("SECONDS", str(seconds)))
    return (
        f"agent.environment.path={folder}/slow.py",
        "agent.environment.cls=Slow",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.total_training_steps=1",
        "trainer.logger=console",
        "alarms.mode=off",
    )


@pytest.mark.long
def test_lines_show_a_long_generation_and_validation(
    tiny_game: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "FIRST_BAR_S", 0.1)
    monkeypatch.setattr(progress, "LINE_S", 0.4)
    settings = slow_game(tmp_path, seconds=0.8)
    config = game_config(tiny_game, tmp_path, *settings, "agent.val_length=8")
    # A line of a busy machine's first moment may tell of fewer, which have begun.
    assert lines_of(config, caplog) >= {("validation", 8), ("step 1", 16)}


@pytest.mark.long
@pytest.mark.usefixtures("cluster")
def test_the_driver_shows_what_all_ranks_play(
    tiny_game: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress, "FIRST_BAR_S", 0.1)
    # Ranks report every two seconds.
    monkeypatch.setattr(progress, "LINE_S", 2.3)
    settings = slow_game(tmp_path, seconds=2.6)
    two_ranks = ("trainer.n_gpus_per_node=2", "agent.val_length=0")
    config = game_config(tiny_game, tmp_path, *settings, *two_ranks)
    assert ("step 1", 16) in lines_of(config, caplog)
