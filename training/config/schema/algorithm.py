"""Holds the settings of `algorithm`: from rewards to advantages."""

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from training.config.schema.actor import KLKind
from training.config.section import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    Threshold,
)


class KLControlConfig(Section):
    """The weight of the KL in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"  #: adaptive = steered towards target_kl
    kl_coef: NonNegativeFloat = 0.001  #: weight, or first weight
    horizon: PositiveInt = 10000  #: adaptive: rows over which the weight follows
    target_kl: PositiveFloat = 0.1  #: adaptive: nats per token to hold


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: groups of equal rewards give way to others."""

    #: draw further groups until a step's all have different rewards within themselves
    enable: bool = False
    #: what must differ: seq_reward, or a number that the reward function returns beside it
    metric: str = "seq_reward"
    #: batches to draw for a step at most; then it makes do with what there is; 0 = no limit
    max_num_gen_batches: NonNegativeInt = 10


class RolloutCorrectionConfig(Section):
    """What is done about log-probs in which engine and trainer differ."""

    #: weigh tokens with trainer/engine; null = not, but by token where trainer.async_level is
    #: above 0; off = not there
    rollout_is: Literal["token", "sequence", "off"] | None = None
    #: UPPER truncates weights; LOWER_UPPER makes those outside 0 (IcePop)
    rollout_is_threshold: Threshold = "2.0"
    rollout_is_batch_normalize: bool = False  #: divide weights by their mean
    #: leave out by token_k1|k2|k3, seq_sum_k1|k2|k3, seq_mean_k1|k2|k3, seq_max_k2|k3, or
    #: several: A,B
    rollout_rs: str | None = None
    #: UPPER; for k1 of the ratio, LOWER_UPPER or UPPER; or one for each: X,Y
    rollout_rs_threshold: Threshold | None = None
    #: leave a row out where a token's ratio is below it
    rollout_token_veto_threshold: PositiveFloat | None = None
    #: take the engine's log-probs for the old ones: no pass for those
    bypass_mode: bool = False
    #: of bypass_mode; reinforce weighs with rollout_is
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"

    @property
    def corrects(self) -> bool:
        """Returns whether tokens are weighed or left out."""
        return any((self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))

    @property
    def weighs_alone(self) -> bool:
        """Returns whether tokens get weights that need no other row's.

        A step's one update can then take them itself.
        """
        needs_other_rows = any(
            (
                self.rollout_is_batch_normalize,
                self.rollout_rs,
                self.rollout_token_veto_threshold,
                self.bypass_mode,
            )
        )
        return bool(self.rollout_is) and not needs_other_rows


class PFPPOConfig(Section):
    """How often a response is trained on, by its score (policy filtration)."""

    #: |score|^weight_pow; best and worst; best first
    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    weight_pow: NonNegativeFloat = 2.0  #: that power


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    #: name registered with register_adv_est; docs/algorithms.md lists them
    adv_estimator: str = "gae"
    gamma: Fraction = 1.0  #: discount per token
    lam: Fraction = 1.0  #: GAE's lambda
    turn_gamma: Fraction = 1.0  #: discount per turn, of turn_gae, turn_return and gigpo
    turn_lam: Fraction = 1.0  #: GAE's lambda per turn, of turn_gae
    #: divide by the group's standard deviation; false = Dr.GRPO
    norm_adv_by_std_in_grpo: bool = True
    #: gigpo: weight of the comparison among turns of one state
    gigpo_step_weight: NonNegativeFloat = 1.0
    #: gdpo: numbers that the reward function gives, each normalised by itself
    gdpo_reward_keys: tuple[str, ...] = ()
    gdpo_reward_weights: tuple[float, ...] = ()  #: gdpo: weight of each; empty = 1
    #: on_policy_distillation: weight of the KL to ref.model.path
    distillation_coef: NonNegativeFloat = 1.0
    #: on_policy_distillation: estimator of the task's part; null = none
    distillation_task: str | None = None
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
