"""Holds every setting of a run: its type, default, bounds, documentation and checks.

Other packages take the sections from here, and `load_config` from `training.config.loader`, which
checks what it reads (`training.config.checks`). A configuration never changes once it is made.
"""

from training.config.batch_plan import BatchPlan, MicroBatching, UpdatePlan
from training.config.schema.actor import ActorConfig, KLKind, PolicyLossChoice
from training.config.schema.agent import AgentConfig, EnvironmentChoice, EnvironmentHome
from training.config.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KLControlConfig,
    PFPPOConfig,
    RolloutCorrectionConfig,
)
from training.config.schema.common import CustomClassConfig, Dtype
from training.config.schema.critic import CriticConfig
from training.config.schema.data import DataConfig, SamplerConfig
from training.config.schema.loss import RunLossConfig
from training.config.schema.model import CriticModelConfig, ModelConfig
from training.config.schema.optim import OptimConfig
from training.config.schema.policy import ActorRolloutRefConfig, RefConfig, RefModelConfig
from training.config.schema.ppo import PPOConfig
from training.config.schema.reward import (
    CustomRewardFunctionConfig,
    OverlongBufferConfig,
    RewardModelConfig,
    ScoringModelConfig,
)
from training.config.schema.rollout import RolloutConfig, ValKwargs
from training.config.schema.trainer import RayKwargs, TrainerConfig
from training.config.schema.update import CheckpointConfig, FSDPConfig, LossAggMode, UpdateConfig
from training.config.section import Section
from training.core_algos.built_in import ESTIMATOR_NEEDS, estimator_needs

# Under verl's names, with our fields.
FSDPActorConfig = ActorConfig
FSDPCriticConfig = CriticConfig
FSDPOptimizerConfig = OptimConfig
OptimizerConfig = OptimConfig
HFModelConfig = ModelConfig
AlgoConfig = AlgorithmConfig
