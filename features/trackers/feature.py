"""Sends a run's metrics to trackers: metrics.jsonl, tensorboard, wandb and others."""

from features.trackers.settings import TrackingSettings
from training.features import Feature

FEATURE = Feature(
    section=TrackingSettings,
    moved_keys={
        "trainer.tracker_timeout_s": "trackers.timeout_s",
        "trainer.tracker_python": "trackers.python",
    },
    moved_modules={
        "training.run.trackers.console": "training.run.console",
        "training.run.trackers.settings": "features.trackers.exchange",
        "training.run.trackers": "features.trackers",
    },
    checks="features.trackers.packages:problems",
    observer="features.trackers.observer:open_trackers",
    loggers=(
        "file",
        "json",
        "tensorboard",
        "wandb",
        "mlflow",
        "swanlab",
        "trackio",
        "clearml",
    ),
    # Before the page, which reads metrics.jsonl as it is cut back for a run that goes on.
    observer_order=30,
)
