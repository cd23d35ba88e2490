"""Holds every setting of a run: its type, default, bounds, documentation and checks.

Other packages take the sections from here, and `load_config` from `training.config.loader`, which
checks what it reads (`training.config.checks`). A configuration never changes once it is made.

Names are resolved at first use: a feature's settings import `training.config.section`, and the
whole configuration has them as a section.
"""

from typing import TYPE_CHECKING, Any

from data.late_names import late_names

if TYPE_CHECKING:
    from training.config.batch_plan import BatchPlan, MicroBatching, UpdatePlan
    from training.config.estimator_needs import ESTIMATOR_NEEDS, estimator_needs
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
    from training.config.schema.update import (
        CheckpointConfig,
        FSDPConfig,
        LossAggMode,
        UpdateConfig,
    )
    from training.config.section import Section

    # Under verl's names, with our fields.
    FSDPActorConfig = ActorConfig
    FSDPCriticConfig = CriticConfig
    FSDPOptimizerConfig = OptimConfig
    OptimizerConfig = OptimConfig
    HFModelConfig = ModelConfig
    AlgoConfig = AlgorithmConfig

# A name -> the module that has it.
_PLACES = {
    "ActorConfig": "training.config.schema.actor",
    "ActorRolloutRefConfig": "training.config.schema.policy",
    "AgentConfig": "training.config.schema.agent",
    "AlgorithmConfig": "training.config.schema.algorithm",
    "BatchPlan": "training.config.batch_plan",
    "CheckpointConfig": "training.config.schema.update",
    "CriticConfig": "training.config.schema.critic",
    "CriticModelConfig": "training.config.schema.model",
    "CustomClassConfig": "training.config.schema.common",
    "CustomRewardFunctionConfig": "training.config.schema.reward",
    "DataConfig": "training.config.schema.data",
    "Dtype": "training.config.schema.common",
    "ESTIMATOR_NEEDS": "training.config.estimator_needs",
    "EnvironmentChoice": "training.config.schema.agent",
    "EnvironmentHome": "training.config.schema.agent",
    "FSDPConfig": "training.config.schema.update",
    "FilterGroupsConfig": "training.config.schema.algorithm",
    "KLControlConfig": "training.config.schema.algorithm",
    "KLKind": "training.config.schema.actor",
    "LossAggMode": "training.config.schema.update",
    "MicroBatching": "training.config.batch_plan",
    "ModelConfig": "training.config.schema.model",
    "OptimConfig": "training.config.schema.optim",
    "OverlongBufferConfig": "training.config.schema.reward",
    "PFPPOConfig": "training.config.schema.algorithm",
    "PPOConfig": "training.config.schema.ppo",
    "PolicyLossChoice": "training.config.schema.actor",
    "RayKwargs": "training.config.schema.trainer",
    "RefConfig": "training.config.schema.policy",
    "RefModelConfig": "training.config.schema.policy",
    "RewardModelConfig": "training.config.schema.reward",
    "RolloutConfig": "training.config.schema.rollout",
    "RolloutCorrectionConfig": "training.config.schema.algorithm",
    "SamplerConfig": "training.config.schema.data",
    "ScoringModelConfig": "training.config.schema.reward",
    "Section": "training.config.section",
    "TrainerConfig": "training.config.schema.trainer",
    "UpdateConfig": "training.config.schema.update",
    "UpdatePlan": "training.config.batch_plan",
    "ValKwargs": "training.config.schema.rollout",
    "estimator_needs": "training.config.estimator_needs",
}
# Under verl's names, with our fields.
_NAMES_OF_VERL = {
    "FSDPActorConfig": "ActorConfig",
    "FSDPCriticConfig": "CriticConfig",
    "FSDPOptimizerConfig": "OptimConfig",
    "OptimizerConfig": "OptimConfig",
    "HFModelConfig": "ModelConfig",
    "AlgoConfig": "AlgorithmConfig",
}
_resolve = late_names(__name__, _PLACES)


def __getattr__(name: str) -> Any:
    return _resolve(_NAMES_OF_VERL.get(name, name))


def __dir__() -> list[str]:
    return [*_PLACES, *_NAMES_OF_VERL]
