"""Holds the settings of `algorithm`: from rewards to advantages.

The settings of a formula stand beside it, in training/core_algos; the sections here inherit them.
"""

from collections.abc import Iterator
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from training.config.section import NonNegativeFloat, NonNegativeInt, Section, Threshold
from training.core_algos.built_in import BUILT_IN_ESTIMATORS
from training.core_algos.correction_settings import RolloutCorrectionSettings
from training.core_algos.estimator_settings import EstimatorSettings
from training.core_algos.kl_settings import KLControlSettings, KLKind

if TYPE_CHECKING:
    from training.config.schema.ppo import PPOConfig


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

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what leaves no group that could differ within itself."""
        n = config.actor_rollout_ref.rollout.n
        if self.enable and n == 1:
            yield (
                "algorithm.filter_groups.enable=true: a group of actor_rollout_ref.rollout.n=1 "
                "never differs within itself; raise n"
            )


class RolloutCorrectionConfig(RolloutCorrectionSettings, Section):
    """What is done about log-probs in which engine and trainer differ."""

    # Here a number may be given, too.
    rollout_is_threshold: Threshold = RolloutCorrectionSettings.rollout_is_threshold
    rollout_rs_threshold: Threshold | None = RolloutCorrectionSettings.rollout_rs_threshold

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields which log-probs the correction in force would miss, or leave others without."""
        in_force = config.with_correction.algorithm.rollout_correction
        reads_engine = in_force.corrects or in_force.bypass_mode
        if reads_engine and not config.actor_rollout_ref.rollout.calculate_log_probs:
            yield (
                "algorithm.rollout_correction reads the engine's log-probs: set "
                "actor_rollout_ref.rollout.calculate_log_probs=true"
            )
        reads_the_pass = (
            config.algorithm.use_kl_in_reward or "sum_pi_squared" in config.estimator_needs
        )
        if in_force.bypass_mode and reads_the_pass:
            yield (
                "algorithm.rollout_correction.bypass_mode makes no pass that use_kl_in_reward or "
                "the estimator reads"
            )


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

    def problems(self, config: "PPOConfig") -> Iterator[str]:
        """Yields what the estimator lacks; resources/algorithms.py looks whether there is one."""
        policy = config.actor_rollout_ref
        if "values" in config.estimator_needs and not config.need_values:
            yield (
                f"algorithm.adv_estimator={self.adv_estimator} reads a critic's values: set "
                "critic.enable=true, or null"
            )
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
        has_teacher = policy.ref.model.path or self.distillation_task
        if self.adv_estimator == "on_policy_distillation" and not has_teacher:
            yield (
                "algorithm.adv_estimator=on_policy_distillation needs a teacher, "
                "actor_rollout_ref.ref.model.path, or with distillation_task the policy as it "
                "began"
            )
        yield from self._group_problems(policy.rollout.n)

    def warnings(self, config: "PPOConfig") -> Iterator[str]:
        """Yields that an estimator which compares the members of a group has nothing to compare."""
        # Nobody knows what a user's own estimator does with groups.
        is_built_in = self.adv_estimator in BUILT_IN_ESTIMATORS
        compares_members = is_built_in and "index" in config.estimator_needs
        if compares_members and config.actor_rollout_ref.rollout.n == 1:
            yield (
                f"algorithm.adv_estimator={self.adv_estimator} compares the responses of a group, "
                "but actor_rollout_ref.rollout.n=1: each keeps its raw score"
            )

    def _group_problems(self, n: int) -> Iterator[str]:
        """Yields what an estimator that compares the members of a group lacks in one of size n."""
        estimators = {"algorithm.adv_estimator": self.adv_estimator}
        if self.adv_estimator == "on_policy_distillation" and self.distillation_task:
            estimators["algorithm.distillation_task"] = self.distillation_task
        for key, name in estimators.items():
            if name == "grpo_passk" and n == 1:
                yield (
                    f"{key}=grpo_passk compares the two best of a group, and a group of "
                    "actor_rollout_ref.rollout.n=1 has no second: set n above 1"
                )
            if name == "maxrl" and self.use_kl_in_reward:
                yield (
                    f"{key}=maxrl divides by a group's mean reward, and with "
                    "algorithm.use_kl_in_reward=true that of wrong answers is their KL alone: set "
                    "it to false, and actor_rollout_ref.actor.use_kl_loss=true instead"
                )
