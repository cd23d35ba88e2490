"""Computes a step's metrics of the models beside the policy: what was asked, and what it cost."""

from collections.abc import Iterable, Mapping
from typing import Any

from custom.models.usage import COUNTED, USAGE
from custom.reward_managers.unscored import UNSCORED
from data.protocol import DataProto
from training.batch.dynamic_sampling import REWARD_INFO


def take_model_metrics(names: Iterable[str]) -> dict[str, float]:
    """Returns what was asked of the config's models since the last time that somebody took it.

    Returns:
        `agent/models/NAME/COUNT`, all of them sums but `seconds`, the mean of a call.
    """
    taken = USAGE.take()
    metrics: dict[str, float] = {}
    for name in names:
        counts = dict.fromkeys(COUNTED, 0.0) | taken.get(name, {})
        counts["seconds"] /= max(counts["calls"], 1.0)
        prefix = f"agent/models/{name}/"
        metrics |= {prefix + counted: value for counted, value in counts.items()}
    return metrics


def count_unscored(batch: DataProto, names: Iterable[str]) -> dict[str, float]:
    """Counts the rows of a batch that no model judged, where the config has models."""
    if not list(names):
        return {}
    values: Any = batch.non_tensor_batch.get(REWARD_INFO + UNSCORED, [])
    return {"agent/models/unscored_rows": float(sum(value is True for value in values))}


def add_usage_of_episodes(episodes: Iterable[Mapping[str, Any]]) -> None:
    """Adds what episodes asked, wherever they were played, to what this process did."""
    for episode in episodes:
        # Those in a checkpoint of an earlier version have none.
        USAGE.add(episode.get("models", {}))
