"""Tells by its name what a metric of validation is; `metrics/validation_metrics.py` names them.

    val-core/SOURCE/reward/mean@N             a source's mean reward over N samples of each task
    val-core/SOURCE/reward/mean@N/ci_low …    about that mean: its interval, its number of tasks
    val-core/SOURCE/reward/best@K/mean …      other rewards, where N is above 1

Invariant: no package is needed, as trackers import it with a Python of their own.
"""

REWARDS = "val-core/"
# These stand beside a mean reward, below its name.
ABOUT_THE_MEAN = ("/ci_low", "/ci_high", "/tasks")


def is_validation_reward(name: str) -> bool:
    """Tells a reward of validation from its interval and its number of tasks."""
    return name.startswith(REWARDS) and not name.endswith(ABOUT_THE_MEAN)


def is_validation_mean(name: str) -> bool:
    """Tells a source's mean reward from all else of validation."""
    return name.startswith(REWARDS) and name.rpartition("/")[2].startswith("mean@")


def short_name(name: str) -> str:
    """Returns the name of a reward of validation without what all of them begin with."""
    return name.removeprefix(REWARDS)
