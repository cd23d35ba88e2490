"""Computes a step's metrics of the services beside the policy: what was asked, what it cost."""

from collections.abc import Collection
from typing import Any

from custom.model_usage import COUNTED, USAGE
from custom.reward_managers.unscored import UNSCORED
from data.protocol import DataProto
from training.batch.episode_rows import REWARD_INFO


def take_model_metrics(names: Collection[str], batch: DataProto | None = None) -> dict[str, float]:
    """Returns what was asked of the run's services since the last time that somebody took it.

    Args:
        names: of what may be asked; none: there are no metrics.
        batch: the step's, whose rows without a score are counted.
    Returns:
        `agent/models/NAME/COUNT`, all of them sums but `seconds`, the mean of a call.
    """
    if not names:
        return {}
    metrics: dict[str, float] = {}
    if batch is not None:
        values: Any = batch.non_tensor_batch.get(REWARD_INFO + UNSCORED, [])
        metrics["agent/models/unscored_rows"] = float(sum(value is True for value in values))
    taken = USAGE.take()
    for name in names:
        counts = dict.fromkeys(COUNTED, 0.0) | taken.get(name, {})
        counts["seconds"] /= max(counts["calls"], 1.0)
        prefix = f"agent/models/{name}/"
        metrics |= {prefix + counted: value for counted, value in counts.items()}
    return metrics
