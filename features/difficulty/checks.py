"""Checks the sampler `difficulty` against the rest of a config."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from features.difficulty.settings import DifficultySettings

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig

log = logging.getLogger(__name__)
NAME = "difficulty"
# What is remembered takes 72 bytes a task, and a draw about a microsecond.
MOST_TASKS = 20_000_000


def config_problems(config: PPOConfig) -> Iterator[str]:
    """Yields what leaves the sampler without tasks that come again, or without a say."""
    settings = config.section(DifficultySettings)
    if config.data.sampler.name != NAME:
        _warn_of_unread(settings)
        return
    plays_rows = bool(config.data.train_files) or not config.environments
    if plays_rows and settings.seeds is not None:
        yield (
            f"difficulty.seeds={settings.seeds}: the tasks are the rows of data.train_files, "
            "which come with a seed of their own each time; take one of the two out"
        )
    yield from _environment_problems(config, plays_rows)
    if settings.explore == 0:
        log.warning(
            "difficulty.explore=0: a task that was too hard, or too easy, never comes again"
        )


def _environment_problems(config: PPOConfig, plays_rows: bool) -> Iterator[str]:
    """Yields what is wrong with the environments as tasks."""
    levels = config.environments
    seeds = config.section(DifficultySettings).seeds
    if not plays_rows and seeds is None and len(levels) == 1:
        yield (
            "data.sampler.name=difficulty: the environment has another seed in every group, so "
            "that no task comes again; set difficulty.seeds to the number of seeds to train on, "
            "give rows (data.train_files), or several levels (env_template)"
        )
    num_tasks = (seeds or 0) * len(levels)
    if num_tasks > MOST_TASKS:
        yield (
            f"difficulty.seeds={seeds} and {len(levels)} environments are {num_tasks} tasks; "
            f"allowed: {MOST_TASKS}, as each is remembered, and one that comes once in a run tells "
            "nothing: make the number of seeds smaller"
        )
    if len(levels) < 2:
        return
    if config.agent.suite.path is not None:
        yield (
            f"data.sampler.name=difficulty and agent.suite.path={config.agent.suite.path} both "
            "choose the environment of each group: take one of them out"
        )
    for number, level in enumerate(levels):
        if level.weight != 1:
            yield (
                f"env_template[{number}].weight={level.weight}: data.sampler.name=difficulty "
                "chooses how often each is played; take the weight out"
            )


def _warn_of_unread(settings: DifficultySettings) -> None:
    """Logs settings that nothing reads without the sampler."""
    default = DifficultySettings()
    for setting in fields(DifficultySettings):
        if settings[setting.name] != default[setting.name]:
            log.warning(
                "difficulty.%s is read by nothing without data.sampler.name=%s", setting.name, NAME
            )
