"""Holds the settings of the policy's loss: which one, clipping, entropy, KL, aggregation.

The section `actor_rollout_ref.actor` inherits `LossSettings`, so that losses read what they need
as `config.NAME`; so does `micro_loss` (workers/dp_actor.py), where entropy and KL are. A setting of
a loss is a field here, and its type holds its bound.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from training.core_algos.correction_settings import RolloutCorrectionSettings
from training.core_algos.kl_settings import KLKind
from training.core_algos.settings import (
    AboveOne,
    ByName,
    NonNegativeFloat,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    check_bounds,
)

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


@dataclass(frozen=True, kw_only=True)
class PolicyLossSettings(ByName):
    """Says which policy loss, and what it alone reads."""

    #: name registered with register_policy_loss; docs/algorithms.md lists them
    loss_mode: str = "vanilla"
    #: clip_cov: share of tokens whose gradient is stopped
    clip_cov_ratio: PositiveFraction = 0.0002
    clip_cov_lb: float = 1.0  #: clip_cov: they are drawn among those of a covariance above it
    clip_cov_ub: float = 5.0  #: clip_cov: and below it
    #: kl_cov: share of tokens that are held near the old policy
    kl_cov_ratio: PositiveFraction = 0.0002
    ppo_kl_coef: NonNegativeFloat = 0.1  #: kl_cov: weight of that
    dro_beta: PositiveFloat | None = None  #: dro: weight of the square; needed there
    custom_kwargs: dict[str, Any] = field(default_factory=dict)  #: settings of a loss of your own


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """Says how far a ratio may go, and what is added to the policy's loss."""

    clip_ratio: NonNegativeFloat = 0.2  #: PPO's clip range
    #: lower clip range; null = clip_ratio; 1 or more = no lower bound
    clip_ratio_low: NonNegativeFloat | None = None
    clip_ratio_high: NonNegativeFloat | None = None  #: upper clip range; null = clip_ratio
    #: dual clip: bound of the ratio where the advantage is negative
    clip_ratio_c: AboveOne = 3.0
    tau_pos: PositiveFloat = 1.0  #: sapo: steepness of the gate where the advantage is positive
    tau_neg: PositiveFloat = 1.05  #: sapo: where it is not
    #: divisor of seq-mean-token-sum-norm; null = the response length
    loss_scale_factor: PositiveInt | None = None
    #: what seq-mean-* counts once: an episode of any number of rows, or each row, as verl does;
    #: with rows nothing is refused whose gradient depends on how an episode is cut into rows
    loss_agg_counts: Literal["episodes", "rows"] = "episodes"
    entropy_coeff: float = 0.0  #: weight of the entropy bonus
    use_kl_loss: bool = False  #: add the KL to the reference policy to the loss (GRPO's way)
    kl_loss_coef: NonNegativeFloat = 0.001  #: weight of that KL
    kl_loss_type: KLKind = "low_var_kl"  #: its estimator; + = straight-through gradient of k2


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig(LossSettings, ByName):
    """Holds what a policy loss may read as `config`: by attribute, or by key as verl's losses do.

    A run hands on the actor's whole section in this form (training/config/schema/loss.py).

    Attributes:
        loss_agg_mode: None: as the loss's paper, see `aggregation`.
        policy_loss: the loss's own settings.
        rollout_correction: settings of bypass_mode, or a mapping of them.
        global_batch_info: the denominators of `agg_loss`.
    """

    loss_agg_mode: LossAggMode | None = None
    policy_loss: PolicyLossSettings = PolicyLossSettings()
    rollout_correction: Any = field(default_factory=RolloutCorrectionSettings)
    # Any, as there may be tensors in it.
    global_batch_info: Any = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def aggregation(self) -> LossAggMode:
        """Returns how token losses become one number, also where the setting is None."""
        return aggregation_of(self.policy_loss.loss_mode, self.loss_agg_mode)


def aggregation_of(loss_mode: str, loss_agg_mode: LossAggMode | None) -> LossAggMode:
    """Returns how a policy loss's tokens become one number: where nothing is set, as its paper.

    That is by token, and for gspo, whose ratio is a sequence's, by sequence.
    """
    if loss_agg_mode is not None:
        return loss_agg_mode
    if loss_mode == "gspo":
        return "seq-mean-token-mean"
    return "token-mean"
