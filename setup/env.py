"""Environments, the small API's configuration, and batches of episodes.

A public path: `from setup.env import ConfigStore` and the rest. config_store.py,
config_sections.py and rollout_data.py define them.
"""

from custom.env import EnvironmentConfig, Trajectory
from custom.env_dataset import CustomEnvDataset as CustomEnvironmentDataset
from custom.reward_manager import EnvironmentRewardWrapper
from setup.config_sections import (
    CheckpointConfig,
    InferenceConfig,
    ModelConfig,
    RayConfig,
    TrainingConfig,
)
from setup.config_store import ConfigStore
from setup.rollout_data import RolloutData, RolloutTurn

__all__ = [
    "CheckpointConfig",
    "ConfigStore",
    "CustomEnvironmentDataset",
    "EnvironmentConfig",
    "EnvironmentRewardWrapper",
    "InferenceConfig",
    "ModelConfig",
    "RayConfig",
    "RolloutData",
    "RolloutTurn",
    "TrainingConfig",
    "Trajectory",
]
