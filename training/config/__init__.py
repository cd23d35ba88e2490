"""Holds every setting of a run: its type, default, bounds and documentation, and what follows from several of them.

The way in: other packages take the names below from here, and `load_config` from `training.config.loader`, which checks
what it reads (`training.config.checks`). A configuration never changes once it is made.
"""

# ruff: noqa: F403, F405
from training.config.algorithm_settings import *
from training.config.settings import *

# Under verl's names, with our fields.
FSDPActorConfig, FSDPCriticConfig, FSDPOptimizerConfig = ActorConfig, CriticConfig, OptimConfig
OptimizerConfig, HFModelConfig, AlgoConfig = OptimConfig, ModelConfig, AlgorithmConfig
