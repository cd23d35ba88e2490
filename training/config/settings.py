"""SHIM: the sections are in training.config.schema, a file a section."""

# ruff: noqa: F401

from training.config.batch_plan import BatchPlan as BatchPlan
from training.config.batch_plan import MicroBatching as MicroBatching
from training.config.batch_plan import UpdatePlan as UpdatePlan
from training.config.estimator_needs import estimator_needs as estimator_needs
from training.config.schema.actor import ActorConfig as ActorConfig
from training.config.schema.agent import PASSED_AS_OBJECT as GIVEN
from training.config.schema.agent import AgentConfig as AgentConfig
from training.config.schema.agent import EnvironmentChoice as EnvironmentChoice
from training.config.schema.agent import EnvironmentHome as EnvironmentHome
from training.config.schema.critic import CriticConfig as CriticConfig
from training.config.schema.data import DataConfig as DataConfig
from training.config.schema.data import SamplerConfig as SamplerConfig
from training.config.schema.model import CriticModelConfig as CriticModelConfig
from training.config.schema.model import ModelConfig as ModelConfig
from training.config.schema.optim import OptimConfig as OptimConfig
from training.config.schema.policy import ActorRolloutRefConfig as ActorRolloutRefConfig
from training.config.schema.policy import RefConfig as RefConfig
from training.config.schema.policy import RefModelConfig as RefModelConfig
from training.config.schema.ppo import PPOConfig as PPOConfig
from training.config.schema.rollout import RolloutConfig as RolloutConfig
from training.config.schema.rollout import ValKwargs as ValKwargs
from training.config.schema.trainer import RayKwargs as RayKwargs
from training.config.schema.trainer import TrainerConfig as TrainerConfig
from training.config.schema.update import CheckpointConfig as CheckpointConfig
from training.config.schema.update import CheckpointPart as CheckpointPart
from training.config.schema.update import FSDPConfig as FSDPConfig
from training.config.schema.update import UpdateConfig as UpdateConfig
