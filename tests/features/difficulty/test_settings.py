"""Which settings are refused, and which memories, with which sentence."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from features.difficulty.checks import config_problems
from features.difficulty.feature import FEATURE, SETTINGS
from features.difficulty.settings import DifficultySettings
from tests.features.difficulty.made import GAME, NAMED, outcome, sampler_of, tell
from training.config import PPOConfig
from training.config.cross_checks import cross_problems
from training.config.loader import load_config
from training.run.checkpoint_folders import CannotResume

LEVELS = "env_template=[{name: 'custom.envs.guess_number:GuessNumber', weight: 2}, {name: 'b:C'}]"
ROWS = [{"prompt": f"row {number}"} for number in range(6)]


def config_of(*words: str) -> PPOConfig:
    return load_config(words, check=False).config


def problems(*words: str) -> list[str]:
    config = config_of(*words)
    return [*config.section(DifficultySettings).problems(), *config_problems(config)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["difficulty.solve_rate=[0.9, 0.1]"], "difficulty.solve_rate=[0.9, 0.1] has the higher"),
        ([NAMED, GAME], "data.sampler.name=difficulty: the environment has another seed in every"),
        ([NAMED, "difficulty.seeds=9"], "difficulty.seeds=9: the tasks are the rows of data.train"),
        (
            [NAMED, GAME, "difficulty.seeds=10000000000"],
            "difficulty.seeds=10000000000 and 1 environments are 10000000000 tasks; allowed: 20000",
        ),
        ([NAMED, LEVELS], "env_template[0].weight=2.0: data.sampler.name=difficulty chooses how"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_with_a_sentence(words: list[str], says: str) -> None:
    (problem,) = problems(*words)
    assert problem.startswith(says), problem


def test_a_suite_and_the_sampler_do_not_both_choose() -> None:
    suite = "agent.suite.path=examples/curriculum.py"
    found = problems(NAMED, LEVELS, suite)
    assert found[0].startswith("data.sampler.name=difficulty and agent.suite.path=")


def test_settings_that_fit_are_taken() -> None:
    assert problems(NAMED, GAME, "difficulty.seeds=100") == []
    assert problems(NAMED, "data.train_files=x.parquet") == []
    assert problems() == []


def test_settings_may_stand_beside_the_name(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {sampler: {name: difficulty, solve_rate: [0.2, 0.8], explore: 0.3, seeds: 9}}"
    )
    settings = config_of(str(file)).section(DifficultySettings)
    assert (settings.solve_rate, settings.explore, settings.seeds) == ((0.2, 0.8), 0.3, 9)
    assert {f"data.sampler.{name}" for name in vars(DifficultySettings())} == set(
        FEATURE.moved_keys
    )
    assert len(SETTINGS) == len(vars(DifficultySettings()))


def test_settings_without_the_sampler_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert problems("difficulty.explore=0.5") == []
    assert "difficulty.explore is read by nothing without data.sampler.name=difficulty" in (
        caplog.text
    )


def test_no_exploration_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert problems(NAMED, "difficulty.explore=0", "data.train_files=x.parquet") == []
    assert "never comes again" in caplog.text


def test_the_samplers_name_is_checked() -> None:
    (unknown,) = of_sampler("data.sampler.name=dificulty")
    assert unknown == (
        "data.sampler.name='dificulty' is unknown; allowed: difficulty, null. Did you mean "
        "'difficulty'?"
    )
    (both,) = of_sampler(NAMED, "data.sampler.class_path=mine.py")
    assert "both give the order of the rows" in both


def of_sampler(*words: str) -> list[str]:
    return [each for each in cross_problems(config_of(*words)) if "data.sampler" in each]


def saved(rows: Any = ROWS, *words: str) -> dict[str, Any]:
    sampler = sampler_of(rows, *words)
    tell(sampler, 1, [outcome(0, 0.0, 1.0)])
    return sampler.state_dict()


def other_prompt() -> list[dict[str, str]]:
    return [*ROWS[:4], {"prompt": "another"}, ROWS[5]]


@pytest.mark.parametrize(
    ("state", "rows", "words", "says"),
    [
        (saved(), ROWS[:5], (), "it is of 6 rows, and there are 5 rows"),
        (saved(), other_prompt(), (), "row 4 is another one, as 1 of 6 compared"),
        (saved(), ROWS[::-1], (), "row 0 is another one, as 6 of 6 compared"),
        (
            saved(range(4), GAME, "difficulty.seeds=6"),
            ROWS,
            (),
            "it is of 6 environment seeds, and there are 6 rows",
        ),
        (
            saved(range(4), GAME, "difficulty.seeds=6"),
            range(4),
            (GAME, "difficulty.seeds=6", "agent.environment.kwargs={highest: 9}"),
            "the environments or their settings are others",
        ),
        ({"told": [1, 2]}, ROWS, (), "it was kept by another sampler"),
        ({"memory": {"groups": torch.zeros(6)}}, ROWS, (), "it was kept by another sampler"),
    ],
)
def test_a_memory_of_other_data_is_refused_with_a_sentence(
    state: dict[str, Any], rows: Any, words: tuple[str, ...], says: str
) -> None:
    sampler = sampler_of(rows, *words)
    with pytest.raises(CannotResume) as refused:
        sampler.load_state_dict(state)
    text = str(refused.value)
    assert f"is not of this run's data: {says}. Go on with the data that it is of, or" in text
    assert "difficulty.forget=true" in text


def test_a_memory_that_is_to_be_forgotten_is() -> None:
    sampler = sampler_of(ROWS[:5], "difficulty.forget=true")
    sampler.load_state_dict(saved())
    assert not sampler.memory.groups.any()


def test_rows_that_change_with_each_reading_are_not_compared() -> None:
    class Noisy:
        reads = 0

        def __len__(self) -> int:
            return 6

        def __getitem__(self, number: int) -> dict[str, Any]:
            self.reads += 1
            return {"prompt": f"row {number}", "noise": self.reads}

    sampler = sampler_of(Noisy())
    sampler.load_state_dict(saved(Noisy()))
    assert sampler.memory.groups[0] == 1


def test_the_same_rows_are_known_whatever_their_columns_hold() -> None:
    rows = [{"ids": torch.arange(3) + n, "info": {"b": [1, None], "a": object()}} for n in range(6)]
    again = [
        {"ids": torch.arange(3) + n, "info": {"a": object(), "b": [1, None]}} for n in range(6)
    ]
    sampler_of(again).load_state_dict(saved(rows))
