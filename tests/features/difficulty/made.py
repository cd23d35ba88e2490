"""What tests of the sampler are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data.learning_sampler import OUTCOMES, GroupOutcome
from data.protocol import DataProto
from features.difficulty.sampler import DifficultySampler, open_sampler
from features.difficulty.settings import DifficultySettings
from training.config import PPOConfig
from training.config.loader import load_config

GAME = "agent.environment.name=custom.envs.guess_number:GuessNumber"
NAMED = "data.sampler.name=difficulty"


def config_of(*words: str) -> PPOConfig:
    """A config that nothing checks."""
    return load_config((NAMED, *words), check=False).config


def settings_of(**values: Any) -> DifficultySettings:
    return DifficultySettings(**values)


def outcome(task: int, *rewards: float, failed: int = 0, tokens: int = 0) -> GroupOutcome:
    return GroupOutcome(task=task, rewards=rewards, failed=failed, tokens=tokens)


def sampler_of(rows: Any, *words: str, per_step: int = 4) -> DifficultySampler:
    """A sampler of these rows, for steps of so many groups."""
    return open_sampler(config_of(f"data.train_batch_size={per_step}", *words), rows)


def tell(sampler: DifficultySampler, step: int, outcomes: Sequence[GroupOutcome]) -> None:
    """Tells a sampler of a step that was made."""
    info = {"global_steps": step, OUTCOMES: list(outcomes)}
    sampler.update(DataProto(meta_info=info))


def draw(sampler: DifficultySampler, step: int, place: int | None = None) -> list[int]:
    """Draws a step's tasks, in the epoch of a number of its own."""
    sampler.begin_draw(step, ())
    sampler.start(epoch=step if place is None else 0, skip=place or 0)
    tasks = iter(sampler)
    return [next(tasks) for _ in range(sampler.per_step)]
