"""Holds the settings of `algorithm`: from rewards to advantages.

The settings of a formula stand beside it, in training/core_algos; the sections here inherit them.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from training.config.section import NonNegativeFloat, NonNegativeInt, Section, Threshold
from training.core_algos.correction_settings import RolloutCorrectionSettings
from training.core_algos.estimator_settings import EstimatorSettings
from training.core_algos.kl_settings import KLControlSettings, KLKind


class KLControlConfig(KLControlSettings, Section):
    """The weight of the KL in the reward."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: groups of equal rewards give way to others."""

    #: draw further groups until a step's all have different rewards within themselves
    enable: bool = False
    #: what must differ: seq_reward, or a number that the reward function returns beside it
    metric: str = "seq_reward"
    #: batches to draw for a step at most; then it makes do with what there is; 0 = no limit
    max_num_gen_batches: NonNegativeInt = 10


class RolloutCorrectionConfig(RolloutCorrectionSettings, Section):
    """What is done about log-probs in which engine and trainer differ."""

    # Here a number may be given, too.
    rollout_is_threshold: Threshold = RolloutCorrectionSettings.rollout_is_threshold
    rollout_rs_threshold: Threshold | None = RolloutCorrectionSettings.rollout_rs_threshold


class PFPPOConfig(Section):
    """How often a response is trained on, by its score (policy filtration)."""

    #: |score|^weight_pow; best and worst; best first
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: NonNegativeFloat = 2.0  #: that power


class AlgorithmConfig(EstimatorSettings, Section):
    """From rewards to advantages."""

    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    use_pf_ppo: bool = False  #: draw the responses to train on anew, by their scores
    pf_ppo: PFPPOConfig = PFPPOConfig()
    #: subtract the KL to the reference policy from each token's reward
    use_kl_in_reward: bool = False
    kl_penalty: KLKind = "kl"  #: its estimator
    kl_ctrl: KLControlConfig = KLControlConfig()
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    #: settings of an estimator of your own
    custom_kwargs: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[str]:
        """Yields what the estimator lacks; resources/algorithms.py looks whether there is one."""
        if self.adv_estimator == "gdpo" and not self.gdpo_reward_keys:
            yield (
                "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys: numbers that the "
                "reward function gives"
            )
        if len(self.gdpo_reward_weights) not in (0, len(self.gdpo_reward_keys)):
            yield (
                "algorithm.gdpo_reward_weights must be as many as algorithm.gdpo_reward_keys, or "
                "empty"
            )
