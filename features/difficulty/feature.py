"""Draws the tasks that are worth their tokens: data.sampler.name=difficulty, difficulty.*."""

from features.difficulty.settings import DifficultySettings
from training.features import Feature

SETTINGS = (
    "solve_rate",
    "solved_reward",
    "min_spread",
    "explore",
    "min_visits",
    "decay",
    "seeds",
    "forget",
    "table_tasks",
)

FEATURE = Feature(
    section=DifficultySettings,
    # Beside the sampler's name, where one looks for them first.
    moved_keys={f"data.sampler.{name}": f"difficulty.{name}" for name in SETTINGS},
    checks="features.difficulty.checks:config_problems",
    samplers={"difficulty": "features.difficulty.sampler:open_sampler"},
    observer="features.difficulty.watching:open_observer",
    # Before the records, which keep a step's metrics, and the page, which shows the table.
    observer_order=16,
    metrics="metric_names.yaml",
)
