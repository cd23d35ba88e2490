"""Tests the checks of the recorder's settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.helpers import assert_refused, checked, load


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["records.gradients=true", "records.keep_gib=0"],
            "records.gradients=true has nowhere to go with records.keep_gib=0: set that above 0",
        ),
        (
            ["records.gradients=true", "trainer.n_gpus_per_node=2"],
            "records.gradients=true needs one rank, and trainer.nnodes=1 x "
            "trainer.n_gpus_per_node=2 are 2: set both to 1, or take it out",
        ),
        (
            [
                "records.gradients=true",
                "trainer.train_finished_groups=true",
                "algorithm.adv_estimator=grpo",
            ],
            "records.gradients=true compares each episode with the whole gradient, which "
            "trainer.train_finished_groups=true has only at the end: take one of the two out",
        ),
    ],
)
def test_gradients_that_cannot_be_recorded_are_refused(
    overrides: list[str], problem: str, runnable: list[str]
) -> None:
    assert_refused(runnable, overrides, problem)


def test_a_folder_for_episodes_that_cannot_be_written_is_named(runnable: list[str]) -> None:
    game = "agent.environment.name=custom.envs.guess_number:GuessNumber"
    assert any(
        "records.folder=/dev/null/x: /dev/null is not a folder that" in text
        for text in checked(runnable, game, "records.folder=/dev/null/x")
    )


def test_home_and_variables_are_read_in_its_folder(
    runnable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE", str(tmp_path))
    folder = "records.folder=$PLACE/episodes"
    assert checked(runnable, folder) == []
    assert load(*runnable, folder).records.folder == str(tmp_path / "episodes")
