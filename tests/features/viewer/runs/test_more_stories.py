"""Eight further faults of runs, each found from the run's page in three clicks at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from features.alarms.rules import slow_episodes
from tests.e2e.test_agents import AGENT, GRPO, fit, game_config, playing
from tests.features.viewer.runs.test_stories import Reader, of_story, steps
from tests.features.viewer.runs.test_stories import play as play
from tests.features.viewer.runs.test_stories import reader as reader
from tests.viewer_data import make_viewer

pytestmark = pytest.mark.browser

MOST_CLICKS = 3
RATE = "actor_rollout_ref.actor.optim.lr"


def found(reader: Reader, *words: str) -> None:
    """Checks that the cause is in sight after few clicks."""
    reader.sees(*words)
    assert len(reader.clicks) <= MOST_CLICKS, reader.clicks


def test_an_environment_that_is_slow_for_some_seeds(
    reader: Reader, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Others may use the machine meanwhile, so that a step takes long.
    monkeypatch.setattr(slow_episodes, "LEAST_SHARE", 0.02)
    reader.open(play(*GRPO, *of_story("SlowSeeds"), "data.train_batch_size=24", steps(3)))
    reader.sees("alarm episodes_slow:", "took up to 3 s in their environment")
    reader.click("the tokens that rang it", within=".alarms", tag="a")
    found(reader, "environment 3)")


def test_replies_whose_middle_nobody_reads(reader: Reader, play: Any) -> None:
    reader.open(play(*GRPO, *of_story("Wordy"), "agent.max_observation_chars=80"))
    reader.sees("are cut at agent.max_observation_chars=80")
    reader.click("the episodes that rang it", within=".alarms", tag="a")
    reader.click_first(".list-row", "the first episode")
    found(reader, "characters or more left out")


def test_a_tool_of_the_environments_own_that_fails(reader: Reader, play: Any) -> None:
    """Its record in `info` has a name and `ok`, and nothing else."""
    reader.open(play(*GRPO, *of_story("OwnCalls"), steps(1)))
    reader.click("calls of database that failed", tag="a")
    reader.click_first(".list-row", "the first episode")
    found(reader, "database", "failed: unnamed", "lookup")


def test_a_task_that_is_never_solved(reader: Reader, play: Any) -> None:
    reader.open(play(*GRPO, *of_story("NamedTasks"), "data.train_batch_size=24", steps(1)))
    reader.click("the worst paid", tag="a")
    reader.click("by task", tag="a")
    reader.click("never", tag="button")
    found(reader, "cellar")


def test_a_run_that_went_on_with_another_learning_rate(
    reader: Reader, tiny_game: Path, tmp_path: Path
) -> None:
    own = ("trainer.save_freq=1", "trainer.resume_mode=auto", *playing("Steady"))
    fit(game_config(tiny_game, tmp_path, *GRPO, *own, steps(1)))
    fit(game_config(tiny_game, tmp_path, *GRPO, *own, steps(3), f"{RATE}=0.2"))
    make_viewer(tmp_path)
    reader.open(tmp_path)
    first = ".alarms tbody tr"
    text = reader.browser.run(f"return document.querySelector('{first}').innerText")
    assert f"behind step 1 the run went on with {RATE}=0.2 in place of" in text
    found(reader, RATE)


def test_tasks_that_are_solved_before_anything_is_learnt(reader: Reader, play: Any) -> None:
    reader.open(play(*GRPO, *of_story("Solved"), steps(2)))
    found(reader, "episodes of Solved got 1", "then they are solved, and harder ones teach more")


def test_a_game_that_is_cut_after_its_first_turn(reader: Reader, play: Any) -> None:
    reader.open(play(*GRPO, *playing("Steady"), "agent.max_turn=1", steps(1)))
    reader.click_point("How episodes ended", step=1)
    reader.click("max_turns", within=".hover.kept", tag="a")
    reader.click_first(".list-row", "the first episode")
    found(reader, "ending max_turns")


def test_turns_that_have_no_room_for_their_end(reader: Reader, play: Any) -> None:
    room = f"{AGENT.rpartition('.')[0]}.max_turn_tokens=1"
    reader.open(play(*GRPO, *playing("Steady"), room, steps(1)))
    reader.click("a turn was cut at its limit", tag="a")
    reader.click_first(".list-row", "the first episode")
    found(reader, "cut: too long")
