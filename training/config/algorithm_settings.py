"""SHIM: sections are in training.config.schema, plans in batch_plan, needs in estimator_needs."""

# ruff: noqa: F401

from training.config.batch_plan import BatchPlan as BatchPlan
from training.config.batch_plan import MicroBatching as MicroBatching
from training.config.batch_plan import UpdatePlan as UpdatePlan
from training.config.batch_plan import choose_micro_batching as micro_batching
from training.config.estimator_needs import ESTIMATOR_INPUTS as OFFERED
from training.config.estimator_needs import ESTIMATOR_NEEDS as ESTIMATOR_NEEDS
from training.config.estimator_needs import ESTIMATORS_WITHIN_GROUPS as OF_ONE_GROUP
from training.config.estimator_needs import LOSSES_SUMMED_OVER_TOKENS as OF_TOKENS
from training.config.estimator_needs import estimator_needs as estimator_needs
from training.config.schema.actor import KLKind as KLKind
from training.config.schema.actor import PlainKL as PlainKL
from training.config.schema.actor import PolicyLossChoice as PolicyLossChoice
from training.config.schema.algorithm import AlgorithmConfig as AlgorithmConfig
from training.config.schema.algorithm import FilterGroupsConfig as FilterGroupsConfig
from training.config.schema.algorithm import KLControlConfig as KLControlConfig
from training.config.schema.algorithm import PFPPOConfig as PFPPOConfig
from training.config.schema.algorithm import RolloutCorrectionConfig as RolloutCorrectionConfig
from training.config.schema.common import Dtype as Dtype
from training.config.schema.reward import CustomRewardFunctionConfig as CustomRewardFunctionConfig
from training.config.schema.reward import OverlongBufferConfig as OverlongBufferConfig
from training.config.schema.reward import RewardModelConfig as RewardModelConfig
from training.config.schema.reward import ScoringModelConfig as ScoringModelConfig
from training.config.schema.update import LossAggMode as LossAggMode
