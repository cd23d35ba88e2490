"""Episodes that are longer than one context: agent.context, context.*."""

from features.context.settings import ContextSettings
from training.features import Feature

FEATURE = Feature(
    section=ContextSettings,
    checks="features.context.checks:config_problems",
    history="features.context.opening:open_history",
    keeper="features.context.counts:open_keeper",
    observer="features.context.counts:open_observer",
    # Before the records, which keep a step's metrics.
    observer_order=15,
    metrics="metric_names.yaml",
)
