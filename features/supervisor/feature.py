"""Starts a run again that crashed or hangs, from its last checkpoint: supervisor.max_restarts."""

from features.supervisor.settings import SupervisorSettings
from training.features import Feature

FEATURE = Feature(
    section=SupervisorSettings,
    moved_keys={"trainer.max_restarts": "supervisor.max_restarts"},
    moved_modules={"contrib.supervisor": "features.supervisor.supervisor"},
    starter="features.supervisor.supervisor:supervise",
)
