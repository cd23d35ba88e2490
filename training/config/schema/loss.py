"""Holds what a run hands to policy losses for `config`: the actor's section and two things more."""

from dataclasses import field
from typing import Any

from training.config.schema.actor import ActorConfig
from training.config.schema.algorithm import RolloutCorrectionConfig
from training.core_algos.loss_settings import PolicyLossConfig


class RunLossConfig(ActorConfig, PolicyLossConfig):
    """The actor's settings as a policy loss reads them, by attribute or by key.

    Beside them are the correction's, for bypass_mode, and the counts of the mini-batch.
    """

    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    # Any, as the tensors in it are not for a config to check.
    global_batch_info: Any = field(default_factory=dict)
