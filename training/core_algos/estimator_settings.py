"""Holds the settings that advantage estimators read as `config.NAME`.

The section `algorithm` inherits them. A setting of an estimator of one's own goes here, or into
`algorithm.custom_kwargs` without a change of code.
"""

from dataclasses import dataclass

from training.core_algos.settings import ByName, Fraction, NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class EstimatorSettings(ByName):
    """Says which estimator makes advantages of rewards, and how."""

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
