"""Says what a page tells first of a run: its validation, its best step, how long it has to go.

Invariant: a tile that the run has no numbers for is left out.
"""

from typing import Any

import numpy as np

from features.run_page.metric_store import MetricStore
from training.run.validation_names import is_validation_mean, short_name

REWARD = "critic/score/mean"
STEP_SECONDS = "timing_s/step"
# Sources whose validation has a tile.
MOST_SOURCES = 2
# The last steps whose seconds tell how long the others will take.
LAST_STEPS = 20


def tiles_of(
    metrics: MetricStore, total_steps: int | None, *, goes_on: bool
) -> list[dict[str, Any]]:
    """Lists the first tiles of a run.

    Returns: of each its label, its `value` or its `seconds`, the other None, and a note.
    """
    validations = [name for name in metrics.names if is_validation_mean(name)]
    rows = []
    for name in validations[:MOST_SOURCES]:
        rows += _best_and_last(metrics, name, f"validation, {short_name(name)}")
    if not validations:
        rows += _best(metrics, REWARD, "reward at its best step")
    if goes_on and total_steps is not None:
        rows += _time_to_go(metrics, total_steps)
    return rows


def _finite(metrics: MetricStore, name: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = metrics.column(name)
    is_finite = np.isfinite(values)
    return steps[is_finite], values[is_finite]


def _tile(
    label: str, note: str, *, value: float | None = None, seconds: float | None = None
) -> Any:
    return {"label": label, "note": note, "value": value, "seconds": seconds}


def _best_and_last(metrics: MetricStore, name: str, label: str) -> list[dict[str, Any]]:
    steps, values = _finite(metrics, name)
    if not len(values):
        return []
    best = int(values.argmax())
    is_last = best == len(values) - 1
    note = f"at step {steps[-1]}, the best" if is_last else f"at step {steps[-1]}"
    rows = [_tile(label, note, value=float(values[-1]))]
    if not is_last:
        rows.append(_tile("its best", f"at step {steps[best]}", value=float(values[best])))
    return rows


def _best(metrics: MetricStore, name: str, label: str) -> list[dict[str, Any]]:
    steps, values = _finite(metrics, name)
    if len(values) < 2:
        return []
    best = int(values.argmax())
    return [_tile(label, f"step {steps[best]}", value=float(values[best]))]


def _time_to_go(metrics: MetricStore, total_steps: int) -> list[dict[str, Any]]:
    _, seconds = _finite(metrics, STEP_SECONDS)
    left = total_steps - metrics.last_step
    if not len(seconds) or left <= 0:
        return []
    per_step = float(seconds[-LAST_STEPS:].mean())
    note = f"{left} steps of {per_step:.3g} s"
    return [_tile("to go", note, seconds=left * per_step)]
