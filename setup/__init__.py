"""The small Python API: `from setup import ...`; docs/python.md is its guide.

    config_store     ConfigStore (config_sections: its fields; import_paths: objects in its YAML)
    trainer          RayPPOTrainer, create_trainer (metrics_history: what fit returns)
    rollout_data     RolloutData: a batch by episode and turn
    evaluation       evaluate: a model's scores on tasks, without training
    engines          create_inference_engine, BatchInferenceManager
    multi_turn       MultiTurnInferenceEngine: conversations, and episodes in an environment
    algo, ppo_batch  losses and advantages on tensors; the tensors of an update by hand
    tools            custom/tools
    env, inference   public paths of config_store and rollout_data, of engines and multi_turn

Invariant: every call ends in the code that `python main.py` runs.
"""

from custom.env import BaseEnvironment, EnvironmentConfig, Trajectory
from custom.env_dataset import CustomEnvDataset as CustomEnvironmentDataset
from custom.envs.simple_game import SimpleGameEnvironment
from custom.reward_manager import EnvironmentRewardWrapper
from setup import algo, env, inference
from setup.algo import PolicyValueModel
from setup.config_sections import (
    CheckpointConfig,
    InferenceConfig,
    ModelConfig,
    RayConfig,
    TrainingConfig,
)
from setup.config_store import ConfigStore
from setup.engines import (
    BaseInferenceEngine,
    BatchInferenceManager,
    HFInferenceEngine,
    InferenceOutput,
    SGLangInferenceEngine,
    VLLMInferenceEngine,
    create_inference_engine,
)
from setup.evaluation import evaluate
from setup.multi_turn import MultiTurnInferenceEngine
from setup.ppo_batch import PPOBatch
from setup.rollout_data import RolloutData
from setup.tools import *
from setup.trainer import CustomRayPPOTrainer, RayPPOTrainer, create_trainer
