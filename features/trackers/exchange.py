"""What a tracker's process is told, and how it is asked and answers.

A request and an answer are a line of JSON each:

    {"open": TrackerSettings, "run_id": …}     {"run_id": …, "url": …}
    {"log": {metric: value}, "step": n}        {}
    {"generations": [row, …], "step": n}       {}
    {"close": failed}                          {}

An answer with "error" says what went wrong; the process goes on.
"""

from dataclasses import dataclass
from typing import Any

# The trackers that are packages with a process of their own, by the name of what is imported.
PACKAGES = ("wandb", "mlflow", "swanlab", "trackio", "clearml")


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """Holds what every tracker files a run under.

    Attributes:
        project, experiment: names of the project and of the run.
        config: the run's resolved configuration.
        folder: the run's.
    """

    project: str
    experiment: str
    config: dict[str, Any]
    folder: str


def flat_config(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the configuration's leaves by their dotted keys."""
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            leaves.update(flat_config(value, f"{name}."))
        else:
            leaves[name] = value
    return leaves
